"""Generated JSON Schemas: seeded draws from the keywords that constrained decoding supports."""

import random
from collections.abc import Callable
from typing import Any

from harness.schemas.chosen import Schema

_WORDS = ("name", "größe", "id", "値", "a b", 'quo"te', "x-y", "tags", "n", "ok")
_PATTERNS = ("^[a-z]{1,4}$", "^(ab|cd)+$", "^[0-9]{2}:[0-9]{2}$", "^[a-zé]{1,3}$", "^x?y*z$")
_FORMATS = ("date", "time", "uuid", "ipv4", "date-time")
_MAX_DEPTH = 3


def generated(seed: int) -> Schema:
    """Generate the schema of a seed. One schema in four has definitions, of which one refers to itself."""
    draw = random.Random(seed)
    if draw.random() < 0.25:
        leaf = _schema(draw, _MAX_DEPTH - 1)
        node = {
            "type": "object",
            "properties": {"value": leaf, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    return _schema(draw, 0)


def _schema(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds: list[Callable[[random.Random, int], Schema]] = [_string, _integer, _number, _enum, _constant, _plain]
    if depth < _MAX_DEPTH:
        kinds += [_object, _object, _array, _any_of]
    return draw.choice(kinds)(draw, depth)


def _string(draw: random.Random, _: int) -> Schema:
    kind = draw.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": draw.choice(_PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": draw.choice(_FORMATS)}
    least = draw.randrange(3)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randrange(6)}


def _integer(draw: random.Random, _: int) -> Schema:
    low = draw.randrange(-1000, 1000)
    found: Schema = {"type": "integer", "minimum": low, "maximum": low + draw.randrange(2000)}
    if draw.random() < 0.2:
        found |= {"multipleOf": draw.choice((2, 5, 10)), "maximum": low + 100}
    return found


def _number(draw: random.Random, _: int) -> Schema:
    low = round(draw.uniform(-100, 100), 2)
    return {"type": "number", "minimum": low, "exclusiveMaximum": round(low + draw.uniform(1, 100), 2)}


def _enum(draw: random.Random, _: int) -> Schema:
    values = [*_WORDS, 0, -3, 2.5, True, None, [], [1, "a"]]
    return {"enum": draw.sample(values, draw.randrange(1, 6))}


def _constant(draw: random.Random, _: int) -> Schema:
    return {"const": draw.choice([0, "x", "ü\t", None, False, [1], {"a": "b"}])}


def _plain(draw: random.Random, _: int) -> Schema:
    return {"type": draw.choice(["boolean", "null", ["boolean", "null"]])}


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(_WORDS, draw.randrange(1, 5))
    return {
        "type": "object",
        "properties": {name: _schema(draw, depth + 1) for name in names},
        "required": draw.sample(names, draw.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randrange(2)
    return {
        "type": "array",
        "items": _schema(draw, depth + 1),
        "minItems": least,
        "maxItems": least + draw.randrange(3),
    }


def _any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(draw, depth + 1) for _ in range(draw.randrange(2, 4))]}
