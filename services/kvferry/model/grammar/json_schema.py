"""Prepares JSON Schemas for the compiler, which enforces some patterns (see `patterns`) and two kinds of bounds of
numbers imprecisely.

- A bound of more than 53 bits is rounded or clamped; it is rejected here.
- An exclusive bound that is a whole number is itself accepted if the range is narrow: `0` satisfies its grammar of
  `{"exclusiveMinimum": 0, "maximum": 0.1}`. Such a bound becomes an inclusive one, moved inwards by `_STEP` of its
  value, so that every output satisfies the schema; the values between the two bounds are lost.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn, TypeGuard

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.model.grammar.patterns import enforceable_pattern

_MAX_EXACT = 1 << 53
_STEP = 1e-9
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_INWARDS = {"exclusiveMinimum": ("minimum", 1), "exclusiveMaximum": ("maximum", -1)}
_PATTERNS = "patternProperties"
_NAMED = frozenset({"properties", _PATTERNS, "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value maps names to schemas."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose value is not a schema."""
_OPTIONS = "x-guidance"


def parsed_schema(source: str) -> Any:
    """Parse a schema and prepare it.

    Raises:
        InvalidRequest: the source is not JSON, or a bound or a pattern cannot be enforced.
    """
    try:
        schema = json.loads(source, parse_constant=_no_constant)
        if isinstance(schema, dict) and _OPTIONS in schema:
            raise _invalid(f"{_OPTIONS} is not accepted; leave it out")
        return enforceable(schema)
    except ValueError as error:
        raise _invalid(f"json_schema is not valid JSON: {shortened(str(error))}") from None
    except RecursionError:
        raise _invalid("json_schema is nested too deeply") from None


def enforceable(schema: Any) -> Any:
    """Return a schema with bounds and patterns that the compiler enforces exactly.

    Raises:
        InvalidRequest: a bound or a pattern cannot be enforced.
    """
    if isinstance(schema, list):
        return [enforceable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            named = enforceable_pattern if key == _PATTERNS else str
            made[key] = {named(name): enforceable(each) for name, each in value.items()}
        elif key == "pattern" and isinstance(value, str):
            made[key] = enforceable_pattern(value)
        else:
            made[key] = value if key in _VALUES else enforceable(value)
    _check_bounds(made)
    if made.get("type") != "integer":
        for key, (inclusive, sign) in _INWARDS.items():
            _move_inwards(made, key, inclusive, sign)
    return made


def _check_bounds(schema: Mapping[str, Any]) -> None:
    for key in _BOUNDS:
        value = schema.get(key)
        if _is_number(value) and abs(value) > _MAX_EXACT:
            raise _invalid(f"{key} is {shortened(str(value))}; only bounds between -2^53 and 2^53 can be enforced")


def _move_inwards(schema: dict[str, Any], key: str, inclusive: str, sign: int) -> None:
    bound = schema.get(key)
    if not _is_number(bound) or bound != math.floor(bound):
        return
    moved = bound + sign * _STEP * max(1.0, abs(bound))
    other = schema.get(inclusive)
    del schema[key]
    if not _is_number(other) or sign * (moved - other) > 0:  # the tighter one of two bounds
        schema[inclusive] = moved


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, field="constraint", reason="CONSTRAINT_INVALID")
