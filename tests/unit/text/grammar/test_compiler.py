"""Grammars accept the texts of their constraint, over the bytes of the tiny model; invalid ones are refused by name."""

import json
import random
import re

import jsonschema
import numpy as np
import pytest
from harness.schemas.chosen import CHOSEN, Schema
from harness.schemas.generated import generated
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.constraint import MAX_CONSTRAINT_BYTES, Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.model import tiny
from kvferry.text.grammar import compiler as module
from kvferry.text.grammar.compiler import GrammarCompiler

EOS = frozenset(tiny.config().eos_token_ids)
COMPILER = GrammarCompiler(tiny.tokenizer(tiny.config()))
SEEDS = range(500)
LONGEST = 4000


def constraint(kind: ConstraintKind, source: object, after: str = "") -> Constraint:
    return Constraint(kind, source if isinstance(source, str) else json.dumps(source, ensure_ascii=False), after)


def accepts(of: Constraint, text: str) -> bool:
    """Return whether a complete output may be `text`: each byte is allowed, and then the end."""
    state = COMPILER.compile(of).start()
    for byte in text.encode():
        if not state.allowed()[byte]:
            return False
        state.advance([byte])
    return bool(state.allowed()[list(EOS)].all())


def drawn(of: Constraint, seed: int) -> str | None:
    """Draw an output byte by byte, preferring bytes that end it. Return `None` if it exceeds `LONGEST`."""
    draw = random.Random(seed)
    state = COMPILER.compile(of).start()
    output = bytearray()
    while len(output) < LONGEST:
        ids = np.flatnonzero(state.allowed())
        ending = [i for i in ids if i in EOS or i in b'"}]']
        token = int(draw.choice(ending if ending and draw.random() < 0.5 else list(ids)))
        if token in EOS:
            return output.decode()
        output.append(token)
        state.advance([token])
    return None


def check(schema: Schema, seed: int) -> None:
    output = drawn(constraint(ConstraintKind.JSON_SCHEMA, schema), seed)
    assert output is not None, "the output exceeds LONGEST"
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.validate(json.loads(output), schema, format_checker=checker)


@pytest.mark.parametrize("name", CHOSEN)
def test_outputs_follow_a_chosen_schema(name: str) -> None:
    for seed in range(3):
        check(CHOSEN[name], seed)


def test_outputs_follow_generated_schemas() -> None:
    for seed in SEEDS:
        check(generated(seed), seed)


@pytest.mark.parametrize(
    ("of", "good", "bad"),
    [
        (constraint(ConstraintKind.JSON_OBJECT, ""), ["{}", '{"a": [1, null]}'], ["[]", "1", '{"a"}']),
        (constraint(ConstraintKind.REGEX, "[0-9]{2,3}(px|em)"), ["12px", "123em"], ["1px", "12", "12px "]),
        (constraint(ConstraintKind.CHOICE, ["yes", "no", 'ö"\n']), ["yes", "no", 'ö"\n'], ["ye", "maybe", ""]),
        (constraint(ConstraintKind.GRAMMAR, 'start: "a" start "b" | "c"'), ["c", "aacbb"], ["acbb", "ab"]),
        (constraint(ConstraintKind.GRAMMAR, 'root ::= "x" item*\nitem ::= [0-9] | "-"'), ["x", "x1-2"], ["xx", "1"]),
        (constraint(ConstraintKind.GRAMMAR, '?start: "a::=" | X\nX: "b"'), ["a::=", "b"], ["a"]),
        (constraint(ConstraintKind.GRAMMAR, 'start[capture]: "a"'), ["a"], ["b"]),
        (constraint(ConstraintKind.CHOICE, ["yes"], after="</think>"), ["hm </think>yes"], ["yes", "</think>no"]),
        (
            constraint(
                ConstraintKind.STRUCTURAL_TAG,
                {
                    "structures": [{"begin": "<f=add>", "schema": {"type": "integer"}, "end": "</f>"}],
                    "triggers": ["<f="],
                },
            ),
            ["no call", "so <f=add>12</f> and"],
            ["<f=sub>1</f>", "<f=add>x</f>", "<f=add>12"],
        ),
        (
            constraint(
                ConstraintKind.STRUCTURAL_TAG,
                {
                    "structures": [{"begin": "<t>", "schema": {"type": "string", "pattern": "^[0-9a]+$"}, "end": "."}],
                    "triggers": ["<t>"],
                },
            ),
            ['<t>"10a".'],
            ['<t>"&&]".', '<t>"b".'],
        ),
    ],
    ids=[
        "json_object",
        "regex",
        "choice",
        "lark",
        "gbnf",
        "lark-modifier",
        "lark-attribute",
        "after",
        "structural_tag",
        "structural_tag-pattern",
    ],
)
def test_each_kind_accepts_exactly_its_texts(of: Constraint, good: list[str], bad: list[str]) -> None:
    assert [accepts(of, text) for text in good] == [True] * len(good)
    assert [accepts(of, text) for text in bad] == [False] * len(bad)


def test_a_constraint_may_begin_after_a_control_token() -> None:
    of = constraint(ConstraintKind.CHOICE, ["yes"], after=tiny.BOS)
    state = COMPILER.compile(of).start()
    control = tiny.tokenizer(tiny.config()).control_tokens[tiny.BOS].token_id
    state.advance([*b"free", control])
    assert set(np.flatnonzero(state.allowed())) == {ord("y")}


def test_a_choice_of_two_words_allows_their_letters() -> None:
    # Gordic, "Inside vLLM", 2025, guided decoding: the choice of Positive and Negative, on characters.
    state = COMPILER.compile(constraint(ConstraintKind.CHOICE, ["Positive", "Negative"])).start()
    assert set(np.flatnonzero(state.allowed())) == {ord("P"), ord("N")}
    words = np.frombuffer(np.pad(state.allowed_bits(), (0, -len(state.allowed_bits()) % 4)).tobytes(), "<u4")
    assert [i for i in range(32 * len(words)) if words[i // 32] >> np.uint32(i % 32) & 1] == [ord("N"), ord("P")]
    state.advance(b"P")
    assert set(np.flatnonzero(state.allowed())) == {ord("o")}


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5), st.data())
def test_choices_are_exactly_the_strings_given(choices: list[str], data: st.DataObject) -> None:
    of = constraint(ConstraintKind.CHOICE, choices)
    assert drawn(of, data.draw(st.integers(0, 1000))) in choices


def test_the_number_of_white_space_characters_is_bounded() -> None:
    # A model that prefers white space would otherwise generate it until max_tokens.
    state = COMPILER.compile(constraint(ConstraintKind.JSON_OBJECT, "")).start()
    state.advance(b"{")
    count = 0
    while state.allowed()[ord(" ")]:
        state.advance(b" ")
        count += 1
    assert 0 < count <= 64


def test_a_token_that_is_not_allowed_fails_the_sequence() -> None:
    state = COMPILER.compile(constraint(ConstraintKind.CHOICE, ["yes"])).start()
    with pytest.raises(InvalidRequest):
        state.advance(b"n")


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (constraint(ConstraintKind.JSON_SCHEMA, {"type": "frob"}), "frob"),
        (constraint(ConstraintKind.JSON_SCHEMA, "["), "not valid JSON"),
        (constraint(ConstraintKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (constraint(ConstraintKind.JSON_SCHEMA, '{"$ref": "http://localhost/x"}'), "not fetch|not present"),
        (constraint(ConstraintKind.JSON_SCHEMA, '{"items":' * 5000 + "{}" + "}" * 5000), "nested too deeply"),
        (constraint(ConstraintKind.REGEX, "(?=a)b"), "look-around"),
        (constraint(ConstraintKind.REGEX, "("), "regex"),
        (constraint(ConstraintKind.CHOICE, []), "1 to 1024"),
        (constraint(ConstraintKind.CHOICE, [""]), "empty"),
        (constraint(ConstraintKind.CHOICE, "[" * 100_000), "not JSON"),
        (constraint(ConstraintKind.GRAMMAR, "start: b"), "b"),
        (constraint(ConstraintKind.GRAMMAR, "%%"), "grammar"),
        (constraint(ConstraintKind.GRAMMAR, 'start: a\na: %json {"uniqueItems": true}'), r"uniqueItems.*\(rule a\)"),
        (constraint(ConstraintKind.GRAMMAR, 'root ::= "a" ("b"'), "not valid GBNF"),
        (constraint(ConstraintKind.GRAMMAR, "start: a\na[temperature=0.3]: /.*/"), "set the request's temperature"),
        (constraint(ConstraintKind.GRAMMAR, 'start.2: "a"'), "priority not supported"),
        (constraint(ConstraintKind.JSON_SCHEMA, {"oneOf": [{"type": "integer"}, {"type": "number"}]}), "use anyOf"),
        (constraint(ConstraintKind.STRUCTURAL_TAG, {"structures": []}), "triggers"),
        (
            constraint(
                ConstraintKind.STRUCTURAL_TAG, {"structures": [{"begin": "a", "schema": {}}], "triggers": ["b"]}
            ),
            "no trigger",
        ),
    ],
)
def test_a_bad_constraint_is_rejected_with_its_reason(of: Constraint, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        COMPILER.check(of)
    assert caught.value.field == "constraint"
    assert len(caught.value.message) < 500


def test_a_costly_step_ends_the_output_and_not_the_process() -> None:
    optional = {f"p{number}": {"type": "null"} for number in range(1200)}
    of = constraint(ConstraintKind.JSON_SCHEMA, {"type": "object", "properties": optional})
    with pytest.raises(InvalidRequest) as caught:
        COMPILER.check(of)
    assert caught.value.reason == "CONSTRAINT_TOO_COMPLEX"


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CACHED", 3)
    compiler = GrammarCompiler(tiny.tokenizer(tiny.config()))
    made = [compiler.compile(constraint(ConstraintKind.CHOICE, [str(n)])) for n in range(4)]
    assert compiler.compile(constraint(ConstraintKind.CHOICE, ["3"])) is made[3]
    assert compiler.compile(constraint(ConstraintKind.CHOICE, ["0"])) is not made[0], (
        "the least recently used grammar was evicted"
    )


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        (ConstraintKind.REGEX, "a" * (MAX_CONSTRAINT_BYTES + 1), str(MAX_CONSTRAINT_BYTES)),
        (ConstraintKind.REGEX, "", "is empty"),
        (ConstraintKind.JSON_OBJECT, "{}", "json_schema"),
    ],
)
def test_sizes_are_bounded(kind: ConstraintKind, source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Constraint(kind, source)


def test_the_real_pattern_of_a_schema_is_the_pattern() -> None:
    of = constraint(ConstraintKind.JSON_SCHEMA, CHOSEN["pattern"])
    assert all(re.fullmatch(r'"[A-Z]{2}-\d{3}"', drawn(of, seed) or "") for seed in range(5))
