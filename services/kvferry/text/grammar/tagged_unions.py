"""Tagged unions: alternatives of `oneOf` that a member with a constant tells apart.

The compiler takes `oneOf` only where it sees that the alternatives exclude each other: by types, or by constants that
are strings. Pydantic and Zod also write tags that are numbers, tags behind `$ref`, and tags with a default, which are
not in `required`. Such a `oneOf` accepts the same values as an `anyOf` whose alternatives require their tags.
"""

from collections.abc import Iterator
from typing import Any

_NOT_SCHEMAS = frozenset({"const", "enum", "default", "examples"})


def distinguished(schema: Any) -> Any:
    """Return a schema in which each `oneOf` of alternatives with different tags is an `anyOf`.

    Args:
        schema: a JSON Schema; it is not modified.
    """
    required: dict[str, str] = {}
    made = _rewritten(schema, schema, required)
    for reference, tag in required.items():
        target = _target(made, reference)
        if isinstance(target, dict):
            _require(target, tag)
    return made


def _rewritten(schema: Any, root: Any, required: dict[str, str]) -> Any:
    """Return a schema with the unions that `distinguished` changes; `required` receives the tags of references."""
    if isinstance(schema, list):
        return [_rewritten(each, root, required) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: value if key in _NOT_SCHEMAS else _rewritten(value, root, required) for key, value in schema.items()}
    alternatives = made.get("oneOf")
    if not isinstance(alternatives, list) or "anyOf" in made:
        return made
    tag = _tag([_resolved(each, root) for each in alternatives])
    if tag is None:
        return made
    for each in alternatives:
        if isinstance(each.get("$ref"), str):
            required[each["$ref"]] = tag
        else:
            _require(each, tag)
    return {("anyOf" if key == "oneOf" else key): value for key, value in made.items()}


def _tag(alternatives: list[Any]) -> str | None:
    """Return a member whose constants differ in all alternatives, and that each has always or by default."""
    if not all(isinstance(each, dict) and isinstance(each.get("properties"), dict) for each in alternatives):
        return None
    for name in alternatives[0]["properties"] if alternatives else ():
        seen: list[str] = []
        for each in alternatives:
            member = each["properties"].get(name)
            values = list(_constants(member))
            names = each.get("required")
            is_required = isinstance(names, list) and name in names
            is_given = is_required or (isinstance(member, dict) and "default" in member)
            if not values or not is_given:
                break
            seen += values
        else:
            if len(set(seen)) == len(seen):
                return str(name)
    return None


def _constants(member: Any) -> Iterator[str]:
    """Yield the constants of a member, as text that differs by type; nothing if other values are possible."""
    if not isinstance(member, dict):
        return
    values = [member["const"]] if "const" in member else member.get("enum")
    for value in values if isinstance(values, list) else ():
        is_whole = isinstance(value, float) and value.is_integer()  # 1.0 equals 1 in JSON Schema
        yield repr(int(value) if is_whole else value)


def _require(schema: dict[str, Any], name: str) -> None:
    names = schema.get("required", [])
    if isinstance(names, list) and name not in names:
        schema["required"] = [*names, name]


def _resolved(schema: Any, root: Any) -> Any:
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    return _target(root, reference) if isinstance(reference, str) else schema


def _target(root: Any, reference: str) -> Any:
    """Return what a reference into `$defs` or `definitions` refers to; `None` for other references."""
    parts = reference.split("/")
    if len(parts) != 3 or parts[0] != "#" or parts[1] not in ("$defs", "definitions") or not isinstance(root, dict):
        return None
    named = root.get(parts[1])
    return named.get(parts[2].replace("~1", "/").replace("~0", "~")) if isinstance(named, dict) else None
