"""Prepares JSON Schemas for the compiler, which enforces some patterns (see `patterns`) and some numbers imprecisely.

- A constant that is not an exact double or has too many digits is rounded or clamped, and is rejected here; for bounds
  see `bounds`.
- A reference into a constant or an annotation is rejected, since it would use a value as a schema that was not
  prepared; so is one into `additionalProperties`, which is replaced.
- Known names of members can also be spelled with escapes, so other names get a pattern that excludes the known ones.
"""

import json
import re
from collections.abc import Collection
from typing import Any, NoReturn
from urllib.parse import unquote

from kvferry.core.constraint import MAX_CONSTRAINT_BYTES
from kvferry.core.errors import InvalidRequest, shortened
from kvferry.text.grammar.annotations import without_annotations
from kvferry.text.grammar.bounds import bound_numbers, is_exact, is_number
from kvferry.text.grammar.errors import invalid
from kvferry.text.grammar.patterns import MAX_NAME, NAME_FORMATS, enforceable_pattern, other_names, without_lookaheads
from kvferry.text.grammar.tagged_unions import distinguished

_PATTERNS = "patternProperties"
_NAMED = frozenset({"properties", _PATTERNS, "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value maps names to schemas."""
_CONSTANTS = frozenset({"const", "enum"})
_ANNOTATIONS = frozenset({"default", "examples"})
"""Keywords whose value is neither a schema nor enforced."""
_REMARKS = _ANNOTATIONS | {"title", "description", "$comment", "deprecated"}
_NOT_REFERRED = _ANNOTATIONS | _CONSTANTS | {"additionalProperties"}
_ANY_NAME = "^(?s:.*)$"
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""Formats of strings that the compiler enforces."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
OPTIONS = "x-guidance"
"""Keyword with options of the compiler."""
LAYOUT = ("item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern")
"""Options that a schema may set at its root: the layout of its JSON. Others change what the compiler enforces."""
WHITESPACE = " "
"""Whitespace between two JSON tokens, if there is any. A small model would fill `max_tokens` with line breaks."""
_MAX_COPIED_CHARS = MAX_CONSTRAINT_BYTES
"""Maximum length of all definitions that take the place of references, as JSON."""
_MAX_EXPANDED_CHARS = 1 << 18
"""Maximum length of the members of an object whose names are an enum, as JSON."""
_MAX_NAMES_CHARS = 1 << 13
"""Maximum length of all names of an object, if other names have a pattern, which is some fifty times as long."""


def parsed_schema(source: str) -> Any:
    """Parse a schema and prepare it.

    Raises:
        InvalidRequest: the source is not JSON, or a part of the schema cannot be enforced.
    """
    try:
        schema = json.loads(source, parse_constant=_no_constant)
    except ValueError as error:
        raise invalid(f"json_schema is not valid JSON: {shortened(str(error))}") from None
    except RecursionError:
        raise _nested() from None
    return enforced(schema, LAYOUT)


def enforced(schema: Any, options: Collection[str] = ()) -> Any:
    """Return a schema that the compiler enforces exactly.

    Args:
        schema: a JSON Schema.
        options: options of the compiler that the schema may set.

    Raises:
        InvalidRequest: a bound, a constant or a pattern cannot be enforced, or the schema sets another option.
    """
    if isinstance(schema, dict) and OPTIONS in schema:
        _check_options(schema[OPTIONS], options)
    try:
        kept = without_annotations(schema)
        return _enforceable(_with_names(distinguished(kept), _Definitions(kept)))
    except RecursionError:
        raise _nested() from None
    except (TypeError, AttributeError):  # such as a number where the keyword has a list
        raise invalid("json_schema is not a valid schema: a keyword has a value of a wrong type") from None


def with_layout(schema: Any) -> Any:
    """Return a schema that limits whitespace to `WHITESPACE`, unless it sets its layout."""
    layout = schema.get(OPTIONS, {}) if isinstance(schema, dict) else None
    if layout is None or "whitespace_pattern" in layout or layout.get("whitespace_flexible") is False:
        return schema
    return {**schema, OPTIONS: {**layout, "whitespace_pattern": WHITESPACE}}


def _check_options(value: Any, options: Collection[str]) -> None:
    if not options:
        raise invalid(f"{OPTIONS} is not accepted; leave it out")
    if not isinstance(value, dict) or not value.keys() <= set(options):
        raise invalid(f"{OPTIONS} must be an object with {', '.join(options)}, not {shortened(repr(value))}")


def _enforceable(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_enforceable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    aheads: list[str] = []
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            named = enforceable_pattern if key == _PATTERNS else str
            made[key] = {named(name): _enforceable(each) for name, each in value.items()}
        elif key == "pattern" and isinstance(value, str):
            *aheads, made[key] = map(enforceable_pattern, without_lookaheads(value))
        elif key in _CONSTANTS:
            made[key] = _exact_constant(key, value)
        elif key == "$ref" and isinstance(value, str):
            made[key] = _checked_reference(value)
        elif key == "uniqueItems" and value is False:  # the default; the compiler refuses the keyword
            continue
        elif key == "format" and not (isinstance(value, str) and value in _FORMATS):
            continue  # an annotation (JSON Schema 2020-12, validation, 7.2.3)
        else:
            made[key] = value if key in _ANNOTATIONS else _enforceable(value)
    if aheads:
        made["allOf"] = [*(made.get("allOf") or ()), *({"pattern": ahead} for ahead in aheads)]
    if made.get("not", False) in (True, {}):  # no value, as Zod writes z.never()
        return False
    _read_names(made)
    bound_numbers(made)
    _name_members(made)
    return made


def _with_names(schema: Any, definitions: "_Definitions") -> Any:
    """Return a schema in which `propertyNames` that refers to a definition has its content, as for keys of an enum."""
    if isinstance(schema, list):
        return [_with_names(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: value if key in _CONSTANTS | _ANNOTATIONS else _with_names(value, definitions)
        for key, value in schema.items()
    }
    names = made.get("propertyNames")
    if isinstance(names, dict) and names.keys() == {"$ref"}:
        defined = definitions.content(names["$ref"])
        if defined is not None:
            made["propertyNames"] = defined
    return made


class _Definitions:
    """The definitions of one schema, which take the place of references to them."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_chars_left = _MAX_COPIED_CHARS

    def content(self, reference: object) -> dict[str, Any] | None:
        """Return a definition by its reference, such as `#/$defs/Color`, without remarks; `None` for other references.

        Raises:
            InvalidRequest: the copies of definitions are too long in total.
        """
        parts = reference.split("/") if isinstance(reference, str) else []
        if len(parts) != 3 or parts[0] != "#" or parts[1] not in ("$defs", "definitions"):
            return None
        table = self._root.get(parts[1]) if isinstance(self._root, dict) else None
        found = table.get(unquote(parts[2]).replace("~1", "/").replace("~0", "~")) if isinstance(table, dict) else None
        if not isinstance(found, dict):
            return None
        kept = {key: value for key, value in found.items() if key not in _REMARKS}
        self._num_chars_left -= len(json.dumps(kept))
        if self._num_chars_left < 0:
            raise invalid(
                f"propertyNames refers to {shortened(str(reference))!r} too often; the definitions in its place are "
                f"more than {_MAX_COPIED_CHARS} characters in total"
            )
        return kept


def _read_names(schema: dict[str, Any]) -> None:
    """Replace `propertyNames`, which the compiler refuses, where other keywords say the same."""
    names = schema.get("propertyNames")
    if names in (True, {}, {"type": "string"}):
        del schema["propertyNames"]
        return
    if not isinstance(names, dict) or "properties" in schema or _PATTERNS in schema:
        return
    others = schema.get("additionalProperties", True)
    if isinstance(names.get("enum"), list) and names.keys() <= {"type", "enum"}:
        if len(names["enum"]) * len(json.dumps(others)) > _MAX_EXPANDED_CHARS:
            raise invalid(
                f"propertyNames has {len(names['enum'])} names; the schema of their members is too long to be repeated "
                "for each; move it to $defs"
            )
        schema["properties"] = {name: others for name in names["enum"] if isinstance(name, str)}
    elif isinstance(names.get("pattern"), str) and names.keys() <= {"type", "pattern", "format"}:
        schema[_PATTERNS] = {names["pattern"]: others}  # Zod's patterns have the whole rule of the format beside them
    elif names.get("format") in NAME_FORMATS and names.keys() <= {"type", "format", "minLength"}:
        if names.get("minLength", 0) not in (0, 1):
            return
        schema[_PATTERNS] = {NAME_FORMATS[names["format"]]: others}
    elif names.keys() <= {"type", "minLength", "maxLength"} and all(
        isinstance(names.get(key, 0), int) for key in ("minLength", "maxLength")
    ):
        schema[_PATTERNS] = {f"^(?s:.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}})$": others}
    else:
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False


def _name_members(schema: dict[str, Any]) -> None:
    """Give the other members of an object with known ones a pattern of names, whose spelling the compiler fixes.

    Otherwise the compiler accepts escapes in their names, such as `\\u0061` for a known member `a`, which parsers then
    take for that member. A name may appear twice, so a minimum number of members cannot be enforced.

    Raises:
        InvalidRequest: names cannot be distinguished, or counted.
    """
    least, required = schema.get("minProperties"), schema.get("required")
    if is_number(least) and least > max(1, len(set(map(str, required))) if isinstance(required, list) else 0):
        raise invalid(
            f"minProperties is {least}; more members than `required` names cannot be enforced, since a name may appear "
            "twice; add names to `required`"
        )
    known, patterns = schema.get("properties") or {}, schema.get(_PATTERNS)
    if patterns and isinstance(known, dict) and set(map(str, required or ())) <= set(known):
        schema.setdefault(
            "additionalProperties", False
        )  # each output satisfies the schema; the other way is no grammar
    others = schema.get("additionalProperties", True)
    if others is False or not (known or patterns) or not isinstance(known, dict):
        return
    if patterns:
        raise invalid(
            f"{_PATTERNS} with other members cannot be enforced; set additionalProperties to false in the same object"
        )
    # Other names need a pattern of their own if their members have a schema, which known members need not match, or if
    # a known name has a control character, which can be spelled in several ways.
    is_distinct = others not in (True, {}) or any(_CONTROL.search(name) for name in known)
    if is_distinct and sum(map(len, known)) > _MAX_NAMES_CHARS:
        raise invalid(
            f"other members beside names of more than {_MAX_NAMES_CHARS} characters in total cannot be enforced; set "
            "additionalProperties to false in the same object"
        )
    if is_distinct and any(len(name) > MAX_NAME or "\x1f" in name for name in known):
        raise invalid(
            f"other members beside names of more than {MAX_NAME} characters, or with the control character U+001F, "
            "cannot be enforced; set additionalProperties to false in the same object"
        )
    name = other_names(known) if is_distinct else _ANY_NAME
    schema |= {_PATTERNS: {name: others}, "additionalProperties": False}


def _checked_reference(reference: str) -> str:
    """Check that a JSON pointer (RFC 6901) does not lead into a value that is not a schema, or that is replaced."""
    _, _, fragment = reference.partition("#")
    names = iter(unquote(fragment).split("/")[1:])
    for name in names:
        keyword = name.replace("~1", "/").replace("~0", "~")
        # A keyword that maps names to schemas is followed by one of these names, which may equal a keyword.
        is_kept = next(names, None) is not None if keyword in _NAMED else keyword not in _NOT_REFERRED
        if not is_kept:
            raise invalid(f"$ref {shortened(reference)!r} refers to a value of {keyword!r}; refer to a schema in $defs")
    return reference


def _exact_constant(key: str, value: Any) -> Any:
    """Return a constant that the compiler reads exactly; whole numbers are written as integers."""
    if isinstance(value, list):
        return [_exact_constant(key, each) for each in value]
    if isinstance(value, dict):
        return {name: _exact_constant(key, each) for name, each in value.items()}
    if not is_number(value):
        return value
    if not is_exact(value):
        raise invalid(
            f"{key} has {shortened(repr(value))}; only numbers of at most 15 digits, and whole numbers between -2^53 "
            "and 2^53, can be enforced; use a string"
        )
    return int(value) if value == int(value) else value


def _nested() -> InvalidRequest:
    return invalid("json_schema is nested too deeply")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")
