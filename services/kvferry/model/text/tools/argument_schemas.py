"""Schemas of a tool's arguments, in the form that the grammar compiler enforces."""

from collections.abc import Mapping

from kvferry.core.errors import InvalidRequest
from kvferry.model.grammar.json_schema import enforced
from kvferry.model.text.tools.definitions import Tool


def enforced_arguments(tool: Tool, schema: Mapping[str, object]) -> Mapping[str, object]:
    """Return a schema of a tool's arguments that the compiler enforces exactly; see `json_schema.enforced`.

    Raises:
        InvalidRequest: a part of the schema cannot be enforced; the message names the tool.
    """
    try:
        made: Mapping[str, object] = enforced(schema)
    except InvalidRequest as error:
        message = f"the parameters of {tool.name!r} cannot be enforced: {error.message}; or use tool_choice auto"
        raise InvalidRequest(message, field="tools", reason=error.reason) from None
    return made
