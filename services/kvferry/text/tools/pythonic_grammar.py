"""The grammar of one Python call with keyword arguments, `f(a=1, b="x")`, from the schema of its arguments.

Keywords come in the order of the schema's properties; optional ones may be left out. Values are written as JSON, which
the parser of the format reads as well as Python. A schema with more than a list of properties (such as `anyOf` beside
them) has no such grammar.
"""

import json
import keyword
from collections.abc import Mapping

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.core.inference.tools import Tool
from kvferry.text.tools.argument_schemas import check_arguments, closed, references, refers_to_definition

_PLAIN = frozenset(
    {"type", "properties", "required", "additionalProperties", "title", "description", "$schema", "strict"}
)
_DEFINITIONS = ("$defs", "definitions")


def pythonic_call(tool: Tool, rule: str, spacing: Mapping[str, object]) -> list[str]:
    """Return the rules of a call of `tool`; the first one is named `rule`.

    Args:
        tool: the tool to call.
        rule: name of the rule, and prefix of the names of the others.
        spacing: llguidance's options for whitespace in JSON.

    Raises:
        InvalidRequest: the schema cannot be expressed as keyword arguments.
    """
    schema = tool.schema
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise _unsuitable(tool, "properties must be an object, and required an array")
    other = sorted(schema.keys() - _PLAIN - set(_DEFINITIONS))
    if other:
        raise _unsuitable(tool, f"it has {shortened(other[0])!r}")
    unknown = [name for name in required if name not in properties]
    if unknown:
        raise _unsuitable(tool, f"it requires {shortened(str(unknown[0]))!r}, which is not in properties")
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    rules: list[str] = []
    for number, (name, value) in enumerate(properties.items()):
        if not name.isidentifier() or keyword.iskeyword(name):
            raise _unsuitable(tool, f"the property {shortened(name)!r} is not a name in Python")
        if not isinstance(value, Mapping | bool):
            raise _unsuitable(tool, f"the property {shortened(name)!r} has no schema")
        inner = value if isinstance(value, Mapping) else {} if value else {"not": {}}
        foreign = next((one for one in references(inner) if not refers_to_definition(one)), None)
        if foreign is not None:
            raise _unsuitable(tool, f"it has a $ref to {shortened(foreign)!r}, which is not in $defs")
        arguments = {**shared, **closed(inner)}
        check_arguments(tool, arguments)
        whole = json.dumps({**arguments, "x-guidance": spacing}, ensure_ascii=False)
        rules += [f'{rule}_{number}: "{name}=" {rule}_{number}_value', f"{rule}_{number}_value: %json {whole}"]
    is_required = [name in required for name in properties]
    return [*_sequence(tool.name, rule, is_required), *rules]


def _sequence(name: str, rule: str, is_required: list[bool]) -> list[str]:
    """Return the rules of the keywords in order, with commas between those that are present.

    Two chains of rules: `first_i` for what may follow if no keyword has been written yet, `next_i` otherwise.
    """
    count = len(is_required)
    rules = [f'{rule}: "{name}(" {rule}_first_0 ")"', f'{rule}_first_{count}: ""', f'{rule}_next_{count}: ""']
    for number in range(count - 1, -1, -1):
        after = f"{rule}_next_{number + 1}"
        skip = "" if is_required[number] else " | {}"
        rules.append(f"{rule}_first_{number}: {rule}_{number} {after}" + skip.format(f"{rule}_first_{number + 1}"))
        rules.append(f'{rule}_next_{number}: ", " {rule}_{number} {after}' + skip.format(after))
    return rules


def _unsuitable(tool: Tool, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"the parameters of {tool.name!r} cannot be enforced in this model's call format, which uses Python keyword "
        f"arguments: {why}; use tool_choice auto, or an object schema with plain properties",
        field="tools",
    )
