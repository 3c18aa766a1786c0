"""Bounds of numbers in JSON Schemas, as the compiler enforces them.

The compiler reads a bound as a double, and a range as one of 64-bit integers. A bound of at most 53 bits is exact. A
larger one that leaves zero in the range, as the smallest 64-bit integer for a `minimum`, is rounded inwards to a double
of 63 bits, so that every output satisfies the schema. A larger one that excludes zero is rejected, since the compiler
has no range beyond it.

An exclusive bound that is a whole number is itself accepted if the range is narrow: `0` satisfies the grammar of
`{"exclusiveMinimum": 0, "maximum": 0.1}`. Such a bound becomes an inclusive one, moved inwards by `_STEP` of its value;
values between the two bounds cannot be generated.
"""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, TypeGuard

from kvferry.core.errors import shortened
from kvferry.text.grammar.errors import invalid

MAX_EXACT = 1 << 53
_MAX_WIDE = (1 << 63) - 1024
"""Largest double below 2^63."""
_MAX_EXACT_POWER = 22
"""Largest power of ten that is exact as a double."""
_MAX_PLACES = 60
"""Maximum number of decimal places of a bound; the compiler's expressions for more are nested too deeply."""
_STEP = 1e-9
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_WIDE = {"minimum": -1, "maximum": 1, "exclusiveMinimum": -1, "exclusiveMaximum": 1}
"""Bounds with the sign of values that leave zero in the range."""
_INWARDS = {"exclusiveMinimum": ("minimum", 1), "exclusiveMaximum": ("maximum", -1)}


def bound_numbers(schema: dict[str, Any]) -> None:
    """Write the bounds of a schema, which is modified, so that the compiler enforces them.

    Raises:
        InvalidRequest: a bound cannot be enforced.
    """
    given = dict(schema)
    _read_flags(schema)
    for key, sign in _WIDE.items():
        _round_inwards(schema, key, sign)
    _check_bounds(schema)
    if schema.get("type") == "integer":
        return
    was_empty = _is_empty(schema)
    for key, (inclusive, sign) in _INWARDS.items():
        _move_inwards(schema, key, inclusive, sign)
    if _is_empty(schema) and not was_empty:
        shown = ", ".join(f"{key} {given[key]}" for key in _BOUNDS[:4] if key in given)
        raise invalid(f"the range of {shown} is too narrow to be enforced")


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_exact(number: int | float) -> bool:
    """Return whether the compiler's JSON parser reads the number as it is: it multiplies the digits, as a double, by a
    power of ten, which is exact only if both are exact doubles. The compiler writes whole numbers without exponent."""
    if not math.isfinite(number) or number == int(number):
        return abs(number) <= MAX_EXACT
    digits, exponent = Decimal(repr(number)).normalize().as_tuple()[1:]
    whole = int("".join(map(str, digits)))
    return whole <= MAX_EXACT and isinstance(exponent, int) and abs(exponent) <= _MAX_EXACT_POWER


def _read_flags(schema: dict[str, Any]) -> None:
    """Replace exclusive bounds of JSON Schema draft 4, which are flags of `minimum` and `maximum`."""
    for key, (inclusive, _) in _INWARDS.items():
        flag = schema.get(key)
        if isinstance(flag, bool):
            del schema[key]
            if flag and is_number(schema.get(inclusive)):
                schema[key] = schema.pop(inclusive)


def _round_inwards(schema: dict[str, Any], key: str, sign: int) -> None:
    bound = schema.get(key)
    if not is_number(bound) or sign * bound <= MAX_EXACT:
        return
    size = abs(bound)
    rounded = float(_MAX_WIDE if size > _MAX_WIDE else size)
    inclusive, _ = _INWARDS.get(key, (key, 0))
    while _written(rounded) > size or (_written(rounded) == size and inclusive != key):
        rounded = math.nextafter(rounded, 0)
    del schema[key]
    other = schema.get(inclusive)
    if not is_number(other) or sign * other > rounded:  # the tighter one of two bounds
        schema[inclusive] = sign * int(rounded)


def _written(number: float) -> Decimal:
    """Return the value of the shortest digits of a double, to which the compiler compares the digits of outputs."""
    return Decimal(repr(number))


def _check_bounds(schema: Mapping[str, Any]) -> None:
    for key in _BOUNDS:
        value = schema.get(key)
        if not is_number(value):
            continue
        if abs(value) > MAX_EXACT and _WIDE.get(key, 0) * value <= 0:
            raise invalid(
                f"{key} is {shortened(str(value))}; only bounds between -2^53 and 2^53, and larger ones that leave 0 "
                "in the range, can be enforced"
            )
        exponent = Decimal(repr(value)).as_tuple().exponent
        if isinstance(exponent, int) and exponent < -_MAX_PLACES:
            raise invalid(f"{key} is {value}; at most {_MAX_PLACES} decimal places can be enforced")
    step = schema.get("multipleOf")
    if is_number(step) and step <= 0:
        raise invalid(f"multipleOf must be greater than 0, not {step}")


def _is_empty(schema: Mapping[str, Any]) -> bool:
    """Return whether no number is within the bounds."""
    lower, upper = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    return (
        (is_number(lower) and is_number(upper) and lower > upper)
        or (is_number(lower) and is_number(below) and lower >= below)
        or (is_number(above) and is_number(upper) and above >= upper)
        or (is_number(above) and is_number(below) and above >= below)
    )


def _move_inwards(schema: dict[str, Any], key: str, inclusive: str, sign: int) -> None:
    bound = schema.get(key)
    if not is_number(bound) or bound != math.floor(bound):
        return
    moved = bound + sign * _STEP * max(1.0, abs(bound))
    other = schema.get(inclusive)
    del schema[key]
    if not is_number(other) or sign * (moved - other) > 0:  # the tighter one of two bounds
        schema[inclusive] = moved
