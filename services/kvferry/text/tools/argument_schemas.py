"""Schemas of a tool's arguments: closes objects, and checks that the compiler can enforce the result. The compiler
prepares every schema in a grammar (`lark_text`)."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.core.inference.tools import Tool
from kvferry.text.grammar.json_schema import enforced

_COMPOSED = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "not", "enum", "const"})
_OPEN = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", *_COMPOSED})
"""Keywords that define which other members an object may have."""
_PLAIN = frozenset(
    {"type", "properties", "required", "additionalProperties", "title", "description", "$schema", "strict"}
)
_DEFINITIONS = ("$defs", "definitions")
MAX_NAME_CHARS = 256
"""Maximum length of an argument's name in formats that write arguments one by one; no longer one is read there."""


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
    ones. JSON Schema allows members that a schema does not mention; a small model would invent them endlessly.

    Objects within others stay as they are if a reference may lead into one, since it may be part of an `allOf` there.
    """
    try:
        return _closed(schema, nested=all(map(refers_to_definition, references(schema))))
    except RecursionError:  # `check_arguments` refuses it
        return dict(schema)


def separate_arguments(
    tool: Tool, unsuitable: Callable[[str], InvalidRequest]
) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield name, schema and whether it is required of each argument, for formats that write arguments one by one. Each
    schema is closed, has the definitions of the whole schema, and can be enforced.

    Args:
        tool: the tool.
        unsuitable: function that returns the error for a schema with more than a list of properties (such as `anyOf`
            beside them), from the reason.

    Raises:
        InvalidRequest: the schema cannot be split, or a part of it cannot be enforced.
    """
    schema = tool.schema
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, Mapping) or not is_list_of_names(required):
        raise unsuitable("properties must be an object, and required an array of strings")
    other = sorted(schema.keys() - _PLAIN - set(_DEFINITIONS))
    if other:
        raise unsuitable(f"it has {shortened(other[0])!r}")
    unknown = [name for name in required if name not in properties]
    if unknown:
        raise unsuitable(f"it requires {shortened(unknown[0])!r}, which is not in properties")
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    for name, value in properties.items():
        if len(name) > MAX_NAME_CHARS:
            raise unsuitable(f"the property {shortened(name)!r} has more than {MAX_NAME_CHARS} characters")
        if not isinstance(value, Mapping | bool):
            raise unsuitable(f"the property {shortened(name)!r} has no schema")
        inner = value if isinstance(value, Mapping) else {} if value else {"not": {}}
        foreign = next((one for one in references(inner) if not refers_to_definition(one)), None)
        if foreign is not None:
            raise unsuitable(f"it has a $ref to {shortened(foreign)!r}, which is not in $defs")
        made = {**shared, **closed(inner)}
        check_arguments(tool, made)
        yield name, made, name in required


def members_in_order(rule: str, members: list[tuple[str, bool]], separator: str) -> list[str]:
    """Return the rules of members that come in order, the optional ones only if they are present, with a separator
    between those that are. The first rule is `RULE_first_0`.

    Two chains of rules: `first_i` for what may follow if no member has been written yet, `next_i` otherwise.

    Args:
        rule: prefix of the names of the rules.
        members: right side of a rule for each member, and whether it is required.
        separator: the separator, as in a rule.
    """
    count = len(members)
    rules = [f'{rule}_first_{count}: ""', f'{rule}_next_{count}: ""']
    for number in range(count - 1, -1, -1):
        member, is_required = members[number]
        after = f"{rule}_next_{number + 1}"
        skip = "" if is_required else " | {}"
        rules.append(f"{rule}_first_{number}: {member} {after}" + skip.format(f"{rule}_first_{number + 1}"))
        rules.append(f"{rule}_next_{number}: {separator} {member} {after}" + skip.format(after))
    return rules


def is_list_of_names(required: object) -> TypeGuard[list[str]]:
    """Return whether a value may be the list `required` of a schema."""
    return isinstance(required, list) and all(isinstance(name, str) for name in required)


def references(schema: object) -> Iterator[str]:
    """Yield the references in a schema."""
    if isinstance(schema, dict):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        for value in schema.values():
            yield from references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from references(value)


def refers_to_definition(reference: str) -> bool:
    """Return whether a reference leads to `$defs` or `definitions` of the whole schema."""
    return reference.startswith(("#/$defs/", "#/definitions/"))


def _closed(schema: Mapping[str, Any], *, nested: bool) -> dict[str, Any]:
    made = dict(schema)
    properties, items, required = (schema.get(key) for key in ("properties", "items", "required"))
    if isinstance(properties, Mapping):
        if nested:
            made["properties"] = {name: _closed_value(one) for name, one in properties.items()}
        is_known = not isinstance(required, list) or all(isinstance(one, str) and one in properties for one in required)
        if is_known and not _OPEN & schema.keys():
            made["additionalProperties"] = False
    if nested and isinstance(items, dict):
        made["items"] = _closed_value(items)
    return made


def _closed_value(schema: Any) -> Any:
    return _closed(schema, nested=True) if isinstance(schema, dict) else schema
