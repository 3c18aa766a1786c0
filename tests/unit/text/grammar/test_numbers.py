"""Numbers of constrained outputs end, also if the model prefers digits."""

import json

import numpy as np
import pytest

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.model import tiny
from kvferry.text.grammar.compiler import GrammarCompiler
from kvferry.text.grammar.grammar import MAX_DIGITS, MAX_EXPONENT_DIGITS

COMPILER = GrammarCompiler(tiny.tokenizer(tiny.config()))
TOKENIZER = tiny.tokenizer(tiny.config())
PRICE = {
    "type": "object",
    "properties": {"price": {"type": "number"}},
    "required": ["price"],
    "additionalProperties": False,
}


def written(kind: ConstraintKind, source: str, preferred: bytes, most: int = 200) -> str:
    """Return the output of a model that takes the first allowed one of the preferred characters, or else the end, or
    else any token."""
    state = COMPILER.compile(Constraint(kind, source)).start()
    ids: list[int] = []
    order = [next(t for t in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(t) == bytes([b])) for b in preferred]
    while len(ids) < most:
        allowed = state.allowed()
        wanted = [token for token in (*order, *TOKENIZER.eos_token_ids) if allowed[token]]
        token = wanted[0] if wanted else int(np.flatnonzero(allowed)[0])
        if token in TOKENIZER.eos_token_ids:
            break
        ids.append(token)
        state.advance([token])
    return TOKENIZER.decode(ids)


@pytest.mark.parametrize(
    "schema", [{"type": "integer"}, {"type": "number"}, {}, PRICE, {"type": "integer", "minimum": 5}]
)
def test_the_digits_of_a_number_are_bounded(schema) -> None:
    found = written(ConstraintKind.JSON_SCHEMA, json.dumps(schema), b"7{")
    assert found.count("7") == MAX_DIGITS
    json.loads(found)


@pytest.mark.parametrize("preferred", [b"e7", b".7"])
def test_fractions_and_exponents_are_bounded(preferred) -> None:
    found = written(ConstraintKind.JSON_SCHEMA, '{"type": "number"}', preferred)
    number = json.loads(found)
    assert abs(number) < float("inf")
    assert all(len(part) <= MAX_DIGITS for part in found.replace("e", ".").split("."))
    if "e" in found:
        assert len(found.partition("e")[2].strip("+-")) <= MAX_EXPONENT_DIGITS


def test_digits_of_strings_and_patterns_are_free() -> None:
    text = written(ConstraintKind.JSON_SCHEMA, '{"type": "string", "maxLength": 60}', b'7"')
    assert text == f'"{"7" * 60}"'
    assert written(ConstraintKind.REGEX, "[0-9]{90}", b"7") == "7" * 90
    pattern = written(ConstraintKind.JSON_SCHEMA, '{"type": "string", "pattern": "^[0-9]{50}$"}', b'7"')
    assert pattern == f'"{"7" * 50}"'


def test_the_whitespace_of_json_is_at_most_a_space_unless_the_schema_sets_it() -> None:
    free = {**PRICE, "x-guidance": {"whitespace_pattern": r"[ \n]{1,4}"}}
    assert "\n" not in written(ConstraintKind.JSON_SCHEMA, json.dumps(PRICE), b"\n {7")
    assert "\n\n\n\n" in written(ConstraintKind.JSON_SCHEMA, json.dumps(free), b"\n {7")
