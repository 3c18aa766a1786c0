"""Tagged unions: alternatives of `oneOf` that a member with a constant tells apart.

The compiler takes `oneOf` only where it sees that the alternatives exclude each other: by types, or by constants that
are strings. Pydantic and Zod also write tags that are numbers, tags behind `$ref`, and tags with a default, which are
not in `required`. Such a `oneOf` accepts the same values as an `anyOf` whose alternatives require their tags.
"""

from collections.abc import Callable, Collection
from typing import Any

from kvferry.text.grammar.errors import invalid

MAX_COMPARED = 1 << 16
"""Maximum number of members that are compared in all unions of a schema: references let a short schema have unions of
many large alternatives."""
_CHARS_COMPARED = 32
"""Number of characters of constants that count as one comparison."""
_NOT_SCHEMAS = frozenset({"const", "enum", "default", "examples"})


def distinguished(schema: Any) -> Any:
    """Return a schema in which each `oneOf` of alternatives with different tags is an `anyOf`.

    Args:
        schema: a JSON Schema; it is not modified.
    """
    union = _Unions(schema)
    made = union.rewritten(schema)
    for reference, tag in union.required.items():
        target = _target(made, reference)
        if isinstance(target, dict):
            _require(target, tag)
    return made


class _Unions:
    """Rewrites the unions of one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self.required: dict[str, str] = {}
        """Tags of the alternatives that are references, by reference."""
        self._num_left = MAX_COMPARED

    def rewritten(self, schema: Any) -> Any:
        """Return a part of the schema with the unions that `distinguished` changes."""
        if isinstance(schema, list):
            return [self.rewritten(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        made = {key: value if key in _NOT_SCHEMAS else self.rewritten(value) for key, value in schema.items()}
        alternatives = made.get("oneOf")
        if not isinstance(alternatives, list) or "anyOf" in made:
            return made
        tag = self._tag([_resolved(each, self._root) for each in alternatives])
        if tag is None:
            return made
        for each in alternatives:
            if isinstance(each.get("$ref"), str):
                self.required[each["$ref"]] = tag
            else:
                _require(each, tag)
        return {("anyOf" if key == "oneOf" else key): value for key, value in made.items()}

    def _tag(self, alternatives: list[Any]) -> str | None:
        """Return a member whose constants differ in all alternatives, and that each has always or by default.

        Raises:
            InvalidRequest: the schema has too many members in alternatives.
        """
        if not all(isinstance(each, dict) and isinstance(each.get("properties"), dict) for each in alternatives):
            return None
        self._count(len(alternatives))
        required = [_texts(each.get("required"), self._count) for each in alternatives]
        for name in alternatives[0]["properties"] if alternatives else ():
            seen: set[str] = set()
            for each, names in zip(alternatives, required, strict=True):
                self._count(1)
                member = each["properties"].get(name)
                is_given = name in names or (isinstance(member, dict) and "default" in member)
                values = self._constants(member) if is_given else []
                if not values or len(set(values)) < len(values) or not seen.isdisjoint(values):
                    break
                seen.update(values)
            else:
                return str(name)
        return None

    def _constants(self, member: Any) -> list[str]:
        """Return the constants of a member, as text that differs by type; none if other values, or values with parts,
        are possible."""
        given = member if isinstance(member, dict) else {}
        values = [given["const"]] if "const" in given else given.get("enum")
        if not isinstance(values, list):
            return []
        self._count(len(values))
        if any(isinstance(value, dict | list) for value in values):
            return []
        texts = [repr(_as_number(value)) for value in values]
        self._count(sum(map(len, texts)) // _CHARS_COMPARED)
        return texts

    def _count(self, num_compared: int) -> None:
        self._num_left -= num_compared
        if self._num_left < 0:
            raise invalid(
                f"oneOf: more than {MAX_COMPARED} members of alternatives must be compared; use anyOf, or fewer "
                "alternatives"
            )


def _texts(names: Any, count: Callable[[int], None]) -> Collection[str]:
    """Return the names of a list as a set, after they were counted."""
    if not isinstance(names, list):
        return ()
    count(len(names))
    return frozenset(name for name in names if isinstance(name, str))


def _as_number(value: Any) -> Any:
    """Return a whole number as an integer, since 1.0 equals 1 in JSON Schema."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


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
