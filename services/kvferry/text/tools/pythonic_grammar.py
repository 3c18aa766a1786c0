"""The grammar of one Python call with keyword arguments, `f(a=1, b="x")`, from the schema of its arguments.

Keywords come in the order of the schema's properties; optional ones may be left out. Values are written as JSON, which
the parser of the format reads as well as Python. A schema with more than a list of properties (such as `anyOf` beside
them) has no such grammar.
"""

import json
import keyword
from collections.abc import Mapping
from functools import partial

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.core.inference.tools import Tool
from kvferry.text.tools.argument_schemas import members_in_order, separate_arguments


def pythonic_call(tool: Tool, rule: str, spacing: Mapping[str, object]) -> list[str]:
    """Return the rules of a call of `tool`; the first one is named `rule`.

    Args:
        tool: the tool to call.
        rule: name of the rule, and prefix of the names of the others.
        spacing: llguidance's options for whitespace in JSON.

    Raises:
        InvalidRequest: the schema cannot be expressed as keyword arguments.
    """
    rules: list[str] = []
    are_required: list[bool] = []
    for number, (name, schema, is_required) in enumerate(separate_arguments(tool, partial(_unsuitable, tool))):
        if not name.isidentifier() or keyword.iskeyword(name):
            raise _unsuitable(tool, f"the property {shortened(name)!r} is not a name in Python")
        whole = json.dumps({**schema, "x-guidance": spacing}, ensure_ascii=False)
        rules += [f'{rule}_{number}: "{name}=" {rule}_{number}_value', f"{rule}_{number}_value: %json {whole}"]
        are_required.append(is_required)
    members = [(f"{rule}_{number}", is_required) for number, is_required in enumerate(are_required)]
    return [f'{rule}: "{tool.name}(" {rule}_first_0 ")"', *members_in_order(rule, members, '", "'), *rules]


def _unsuitable(tool: Tool, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"the parameters of {tool.name!r} cannot be enforced in this model's call format, which uses Python keyword "
        f"arguments: {why}; use tool_choice auto, or an object schema with plain properties",
        field="tools",
    )
