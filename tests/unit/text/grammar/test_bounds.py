"""Large bounds of numbers are enforced by the compiler: every output is within them."""

import json
from typing import Any

import pytest

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.model import tiny
from kvferry.text.grammar.bounds import bound_numbers
from kvferry.text.grammar.compiler import GrammarCompiler

COMPILER = GrammarCompiler(tiny.tokenizer(tiny.config()))
EOS = list(tiny.config().eos_token_ids)
LARGEST = 2**63 - 1024
"""Largest double below 2^63."""


def accepts(schema: dict[str, Any], value: int | float) -> bool:
    state = COMPILER.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))).start()
    for byte in json.dumps(value).encode():
        if not state.allowed()[byte]:
            return False
        state.advance([byte])
    return bool(state.allowed()[EOS].all())


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("size", [2**53 + 1, 2**60, 2**60 + 1, 2**63 - 1, 2**63, 2**64, 10**30])
def test_values_near_a_large_bound_follow_it(kind: str, size: int) -> None:
    reach = min(size, LARGEST)
    for bounds in ({"maximum": size}, {"maximum": size, "minimum": -size}, {"exclusiveMaximum": size, "minimum": 0}):
        schema = {"type": kind, **bounds}
        assert accepts(schema, 2**53 + 1 if size > 2**53 + 1 and "exclusiveMaximum" not in bounds else 2**53 - 1)
        assert accepts(schema, reach - 2048)
        assert not accepts(schema, size + 1)
        assert not accepts(schema, 2 * size)
        assert not ("exclusiveMaximum" in bounds and accepts(schema, size))
        assert accepts(schema, -5) == ("minimum" not in bounds or bounds["minimum"] < 0)
    for bounds in ({"minimum": -size}, {"exclusiveMinimum": -size, "maximum": 0}):
        schema = {"type": kind, **bounds}
        assert accepts(schema, 2048 - reach)
        assert not accepts(schema, -size - 1)


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        ({"maximum": 2**53 + 1}, {"maximum": 2**53}),
        ({"maximum": 2**63 - 1}, {"maximum": LARGEST}),
        ({"minimum": -(2**63)}, {"minimum": -LARGEST}),
        ({"maximum": 1e300}, {"maximum": LARGEST}),
        ({"exclusiveMaximum": 2**60}, {"maximum": 2**60 - 128}),
        ({"exclusiveMaximum": 2**64, "maximum": 5}, {"maximum": 5}),
        ({"exclusiveMinimum": -(2**64), "minimum": -(2**70)}, {"minimum": -LARGEST}),
        ({"maximum": 2**64, "exclusiveMaximum": True}, {"maximum": LARGEST}),
    ],
)
def test_a_bound_is_rounded_inwards(schema: dict[str, Any], made: dict[str, Any]) -> None:
    bound_numbers(schema)
    assert schema == made


@pytest.mark.parametrize("schema", [{"minimum": 2**53 + 1}, {"maximum": -1e30}, {"multipleOf": 2**54}])
def test_a_range_beyond_is_refused_by_its_keyword(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"{next(iter(schema))} is .* larger ones that leave 0 in the range"):
        bound_numbers(schema)
