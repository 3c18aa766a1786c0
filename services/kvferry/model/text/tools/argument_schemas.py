"""Schemas of a tool's arguments as its grammar contains them. They are only checked here, since the compiler prepares
every schema in a grammar (`lark_text`)."""

from collections.abc import Mapping
from typing import Any

from kvferry.core.errors import InvalidRequest
from kvferry.model.grammar.json_schema import enforced
from kvferry.model.text.tools.definitions import Tool

_COMPOSED = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "not"})
_OPEN = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", *_COMPOSED})
"""Keywords that define which other members an object may have."""


def check_arguments(tool: Tool, schema: Mapping[str, object]) -> None:
    """Check that the compiler enforces a schema of a tool's arguments exactly; see `json_schema.enforced`.

    Raises:
        InvalidRequest: a part of the schema cannot be enforced; the message names the tool.
    """
    try:
        enforced(schema)
    except InvalidRequest as error:
        message = f"the parameters of {tool.name!r} cannot be enforced: {error.message}; or use tool_choice auto"
        raise InvalidRequest(message, field="tools", reason=error.reason) from None


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have no members besides those in `properties`, unless the schema defines other
    ones. JSON Schema allows members that a schema does not mention; a small model would invent them endlessly."""
    made = dict(schema)
    properties, items = schema.get("properties"), schema.get("items")
    if isinstance(properties, Mapping):
        made["properties"] = {name: closed(one) if isinstance(one, dict) else one for name, one in properties.items()}
        if not _OPEN & schema.keys():
            made["additionalProperties"] = False
    if isinstance(items, dict):
        made["items"] = closed(items)
    return made
