"""Patterns of JSON strings: every accepted string matches, also where a class contains all control characters."""

import json
import re
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.model import tiny
from kvferry.text.grammar.compiler import GrammarCompiler
from kvferry.text.grammar.patterns import enforceable_pattern, other_names, without_lookaheads

COMPILER = GrammarCompiler(tiny.tokenizer(tiny.config()))
EOS = list(tiny.config().eos_token_ids)
CLASSES = [
    r"[\x00-\x1f]", '[^"]', r"[^\\]", r"[^\"\\]", "[^a]", r"[\x00-!]", r"\W", r"\D", r"\S", r"[\W_]", r"[^]a]",
    r"[]\x00-\x1f]", '[["]', '[^["]', "[a&&b]", "[&--a]", "[~~]", "[a-c]", "a", r"\\", r"\"",
]  # fmt: skip
CHARACTERS = ["[", "&", "-", "~", '"', "\\", "\n", "\x00", "\x01", "\x1e", "a", "b", "]", "_", "7", " ", "é"]


def accepts(schema: object, text: str) -> bool:
    state = COMPILER.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))).start()
    for byte in text.encode():
        if not state.allowed()[byte]:
            return False
        state.advance([byte])
    return bool(state.allowed()[EOS].all())


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(CLASSES), min_size=1, max_size=3), st.lists(st.sampled_from(CHARACTERS), max_size=3))
def test_a_string_is_accepted_if_and_only_if_it_matches(classes: list[str], characters: list[str]) -> None:
    pattern, text = f"^{''.join(classes)}$", "".join(characters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about operators in classes, which are literal
        matches = re.fullmatch(pattern[1:-1], text, re.ASCII) is not None  # as in ECMAScript
    assert accepts({"type": "string", "pattern": pattern}, json.dumps(text, ensure_ascii=False)) == matches


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        ("^(?=.{1,3}$)a+$", ["^(?:.{1,3}$)", "^a+$"]),
        (r"^(?=[)\]]x)(?=\()b", [r"^(?:[)\]]x)", r"^(?:\()", "^b"]),
        ("^(?=a)b|c", ["^(?=a)b|c"]),
        ("^(?=a)(b|c)[|]$", ["^(?:a)", "^(b|c)[|]$"]),
        ("^(?=a", ["^(?=a"]),
        ("(?=a)b", ["(?=a)b"]),
        ("^(?!a)b", ["^(?!a)b"]),
        ("^ab$", ["^ab$"]),
    ],
)
def test_lookaheads_at_the_start_are_patterns_of_their_own(pattern: str, parts: list[str]) -> None:
    assert without_lookaheads(pattern) == parts


def test_a_pattern_and_its_lookahead_hold_together() -> None:
    schema = {"type": "string", "pattern": r"^(?=.{2,3}$)(?=[^x]*$)[a-z]+$", "allOf": [{"minLength": 3}]}
    assert accepts(schema, '"abc"')
    for text in ('"ab"', '"abcd"', '"abx"', '"AB1"'):
        assert not accepts(schema, text), text
    with pytest.raises(InvalidRequest, match="look-ahead"):
        COMPILER.check(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": "a(?=b)"})))


@pytest.mark.parametrize("character", ['"', "\\"])
def test_names_of_properties_match_their_pattern(character: str) -> None:
    schema = {
        "type": "object",
        "patternProperties": {r"^[\x00-\x1f]$": {"type": "null"}},
        "additionalProperties": False,
    }
    assert accepts(schema, json.dumps({"\x01": None}, separators=(",", ":")))
    assert not accepts(schema, json.dumps({character: None}, separators=(",", ":")))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^[a-z]+$", r"^[[a-z]&&[^\x1f]]+$"),
        (r"\[[^]\]]\]", r"\[[[^]\]]&&[^\x1f]]\]"),
        (r"[a[^b]x", r"[[a\[^b]&&[^\x1f]]x"),
        (r"[a&&b--c~]", r"[[a\&\&b\-\-c\~]&&[^\x1f]]"),
        (r"\P{Lu}\pN\d\x20", r"[\P{Lu}&&[^\x1f]][\pN&&[^\x1f]]\d\x20"),
        ("(?s:.{0,9})", "(?s:.{0,9})"),
    ],
)
def test_one_control_character_is_removed_from_classes(pattern: str, expected: str) -> None:
    assert enforceable_pattern(pattern) == expected


@pytest.mark.parametrize("pattern", ["a\x1fb", r"\x1f", r"\x1F+", r"\u001f", r"\u{1f}", r"\x{001F}", r"\U0000001f"])
def test_that_character_is_refused_outside_of_a_class(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match=r"U\+001F"):
        enforceable_pattern(pattern)


@settings(deadline=None, max_examples=200)
@given(st.sets(st.text('ab"é', max_size=4), min_size=1, max_size=5), st.text('ab"éc', max_size=6))
def test_other_names_are_all_strings_but_some(names: set[str], text: str) -> None:
    plain = other_names(names).replace(r"]&&[^\x1f]]", "]").replace("[[", "[")  # Python has no intersections
    pattern = re.sub(r"\\u\{([0-9a-f]+)\}", lambda found: re.escape(chr(int(found[1], 16))), plain)
    assert (re.fullmatch(pattern, text) is not None) == (text not in names)


def test_a_pattern_that_ignores_white_space_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="sets the flag x, which is not supported"):
        enforceable_pattern('(?x)^#[\n[^"]|b]$')
    for pattern in (r"\\(?x)#", "a(?ix:b)", "(?i-x)"):
        with pytest.raises(InvalidRequest, match="sets the flag x"):
            enforceable_pattern(pattern)
    for pattern in (r"\(?x(?i:y)", "(?:x)", "(?P<x>a)", "(?<x>a)"):
        assert enforceable_pattern(pattern) == pattern
