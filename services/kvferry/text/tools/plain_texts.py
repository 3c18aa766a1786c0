"""Expressions of the texts of strings without quotes and escapes, for call formats that write strings as they are.

An expression is one of a terminal in llguidance's grammars. A pattern, a length, a list of strings or a format limits
the texts.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.text.answers.xml_calls import definition, kinds_of
from kvferry.text.grammar.patterns import enforceable_pattern

IGNORED = frozenset(
    {"type", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
    | {"$defs", "definitions", "x-guidance", "contentEncoding", "contentMediaType", "nullable"}
)
"""Keywords that do not limit a string."""
_PLACES = frozenset({"^", "$", r"\b", r"\B", r"\A", r"\z"})
"""Parts of patterns that match places, which no expression can have."""
ANY = "/(?s:.*)/"
_NULL = "/null/"
_DAY = (
    "([0-9]{4}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
    "|[0-9]{2}(0[48]|[2468][048]|[13579][26])-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,20}[A-Za-z0-9])?"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMATS: Mapping[str, str] = {
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "duration": "P([0-9]{1,9}D(T[0-9]{1,9}[HMS])?|[0-9]{1,9}[WMY]|T[0-9]{1,9}[HMS])",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,31}})?@{_LABEL}(\.{_LABEL}){{1,4}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,8}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "[0-9a-f]{1,4}(:[0-9a-f]{1,4}){7}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:([A-Za-z0-9._~:\/?#@!$&'()*+,;=-]|\[|\]|\x25[0-9A-Fa-f]{2})+",
}
"""Patterns of formats of strings: each matches only texts of the format, and most of these."""
_LIMITS = frozenset({"pattern", "minLength", "maxLength", "format"})
_MAX_VISITS = 512
"""Maximum number of schemas in the schema of a string."""
_LITERAL: Mapping[str, str] = {"/": r"\/", "\n": r"\n", r"\%": "%"}
"""How parts of a pattern are written between slashes."""
Unsuitable = Callable[[str], InvalidRequest]
"""Returns the error for a schema that cannot be expressed, from the reason."""


class PlainTexts:
    """Writes expressions of the texts of strings, and of null."""

    def __init__(self, root: Mapping[str, Any], unsuitable: Unsuitable) -> None:
        self._root, self._unsuitable = root, unsuitable
        self._visits = iter(range(_MAX_VISITS))

    def of(self, schema: Any, outer: frozenset[str]) -> str:
        """Return the expression of a schema's texts, of the types `outer` at most.

        Raises:
            InvalidRequest: the schema cannot be expressed.
        """
        if next(self._visits, None) is None:
            raise self._unsuitable("the schema of a string has too many parts, or refers to itself")
        if not isinstance(schema, Mapping):
            raise self._unsuitable("the schema of a string has a part that is no object")
        kinds = kinds_of(schema, self._root) & outer
        if not kinds:
            raise self._unsuitable("a string has no possible value")
        parts: list[str] = []
        for key, value in schema.items():
            if key in ("anyOf", "oneOf") and isinstance(value, list):
                if key == "oneOf":
                    check_exclusive(value, self._root, kinds, self._unsuitable)
                inner = [self.of(each, kinds) for each in value if kinds_of(each, self._root) & kinds]
                parts.append(" | ".join(f"({each})" for each in inner))
            elif key == "allOf" and isinstance(value, list):
                parts += [self.of(each, kinds) for each in value]
            elif key == "$ref":
                parts.append(self.of(definition(str(value), self._root), kinds))
            elif key in ("const", "enum"):
                parts.append(one_of(value if isinstance(value, list) else [value], kinds))
            elif key not in _LIMITS and key not in IGNORED:
                raise self._unsuitable(f"the schema of a string has {shortened(key)!r}")
        limits = " & ".join(self._limits(schema)) if "string" in kinds else _NULL
        if limits:
            parts.append(f"({limits}) | {_NULL}" if "null" in kinds else limits)
        return " & ".join(f"({part})" for part in parts if part) or ANY

    def _limits(self, schema: Mapping[str, Any]) -> Iterator[str]:
        """Yield the expressions of a string's own limits."""
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if "minLength" in schema or "maxLength" in schema:
            if not all(type(one) is int and one >= 0 for one in (least, most or 0)):
                raise self._unsuitable("minLength and maxLength must be whole numbers")
            yield f"/(?s:.{{{least},{most}}})/"
        if isinstance(schema.get("pattern"), str):
            yield f"/{self._searched(schema['pattern'])}/"
        if isinstance(schema.get("format"), str) and schema["format"] in FORMATS:
            yield f"/{FORMATS[schema['format']]}/"

    def _searched(self, pattern: str) -> str:
        """Return a pattern that matches all of a text in which `pattern` matches a part."""
        parts = re.findall(r"\\.|.", enforceable_pattern(pattern), re.DOTALL)
        is_begun, is_ended = parts[:1] == ["^"], parts[-1:] == ["$"]
        parts = parts[is_begun : len(parts) - is_ended]
        depth, in_class = 0, False
        for part in parts:
            if in_class:
                in_class = part != "]"
                continue
            in_class = part == "["
            depth += (part == "(") - (part == ")")
            if part in _PLACES or (part == "|" and not depth and (is_begun or is_ended)):
                raise self._unsuitable(f"the pattern {shortened(pattern)!r} has {part!r} beside or inside of it")
        inner = "".join(_LITERAL.get(part, part) for part in parts).replace("%json", r"\x25json")
        return f"{'' if is_begun else '(?s:.*)'}(?:{inner}){'' if is_ended else '(?s:.*)'}"


def one_of(values: list[Any], kinds: frozenset[str]) -> str:
    """Return the expression of the constants of these types."""
    texts = [escaped(value) for value in values if isinstance(value, str) and "string" in kinds]
    return "/(?:" + "|".join([*texts, *["null"] * (None in values and "null" in kinds)]) + ")/"


def check_exclusive(
    branches: list[Any], root: Mapping[str, Any], outer: frozenset[str], unsuitable: Unsuitable
) -> None:
    """Check that no value matches two schemas of a `oneOf`: they have different types, or different constants.

    Args:
        branches: the schemas.
        root: the schema that has the definitions.
        outer: the types that are possible at all.
        unsuitable: returns the error.

    Raises:
        InvalidRequest: a value may match several schemas.
    """
    ranges: frozenset[str] = frozenset()
    """Types of the alternatives that are not constants."""
    constants: frozenset[str] = frozenset()
    values: set[str] = set()
    for branch in branches:
        kinds, own = kinds_of(branch, root) & outer, _constants(branch)
        if own is None:
            is_shared = bool(kinds & (ranges | constants))
            ranges |= kinds
        else:
            is_shared = bool(kinds & ranges) or not values.isdisjoint(own)
            constants |= kinds
            values |= own
        if is_shared:
            raise unsuitable("oneOf needs alternatives of different types or with different constants; use anyOf")


def _constants(schema: Any) -> set[str] | None:
    """Return the constants of a schema as JSON; `None` if it is not a list of constants."""
    given = schema if isinstance(schema, Mapping) else {}
    values = [given["const"]] if "const" in given else given.get("enum")
    return {json.dumps(value, sort_keys=True) for value in values} if isinstance(values, list) else None


def quoted(text: str) -> str:
    """Quote a string for a rule."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f").replace("%", "\\u0025")


def escaped(text: str) -> str:
    """Return a pattern that matches `text`."""
    return "".join(each if each.isalnum() and each.isascii() else f"\\x{{{ord(each):x}}}" for each in text)
