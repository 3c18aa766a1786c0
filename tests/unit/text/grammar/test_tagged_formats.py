"""Formats of structural tags, as xgrammar 0.2 and vLLM 0.32 write them: which texts each accepts, with markers that are
text, tokens, or control tokens, and errors."""

import json
import re
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.text.grammar.compiler import GrammarCompiler
from kvferry.text.tokenizing.byte_level import CHARACTER_OF
from kvferry.text.tokenizing.tokenizer import Tokenizer

EOS = "<|end|>"
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|open|>", "<|close|>")
CITY = {"type": "object", "properties": {"c": {"type": "string", "maxLength": 9}}, "required": ["c"]}
OSLO = '{"c":"Oslo"}'


def vocabulary(special: tuple[str, ...], ordinary: tuple[str, ...]) -> Tokenizer:
    def make() -> tokenizers.Tokenizer:
        fast = tokenizers.Tokenizer(models.BPE(vocab={CHARACTER_OF[byte]: byte for byte in range(256)}, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (EOS, *special)])
        fast.add_tokens([AddedToken(text, special=False, normalized=False) for text in ordinary])
        return fast

    return Tokenizer(make, vocab_size=257 + len(special) + len(ordinary), eos_token_ids=(256,))


PLAIN = vocabulary((), ())
COMPILERS = {
    "text": GrammarCompiler(PLAIN),
    "ordinary": GrammarCompiler(vocabulary(MARKERS[4:], MARKERS[:4])),
    "control": GrammarCompiler(vocabulary(MARKERS, ())),
}


def accepts(compiler: GrammarCompiler, form: dict[str, Any], text: str, *, by_token: bool = True) -> bool:
    """Return whether a text is a whole output; markers of the vocabulary are their tokens if `by_token`."""
    source = json.dumps({"type": "structural_tag", "format": form})
    state = compiler.compile(Constraint(ConstraintKind.STRUCTURAL_TAG, source)).start()
    for token in tokens_of(compiler, text) if by_token else list(text.encode()):
        if not state.allowed()[token]:
            return False
        state.advance([token])
    return bool(state.allowed()[256])


def tokens_of(compiler: GrammarCompiler, text: str) -> list[int]:
    """Return the tokens of a text: markers of the vocabulary, and bytes."""
    added = compiler._tokenizer.added_tokens
    parts = re.split("(" + "|".join(map(re.escape, MARKERS)) + ")", text)
    return [token for part in parts for token in ([added[part]] if part in added else part.encode())]


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


ANY: dict[str, Any] = {"type": "any_text"}
JSON: dict[str, Any] = {"type": "json_schema", "json_schema": CITY, "style": "json", "excludes": []}
NUMBER: dict[str, Any] = {"type": "regex", "pattern": "[0-9]+/[0-9]"}
CALL = tag("<tool_call>w:", JSON, "</tool_call>")
TRIGGERED: dict[str, Any] = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [CALL]}
CALLED = f"<tool_call>w:{OSLO}</tool_call>"
THOUGHT = tag("", {"type": "any_text", "excludes": ["<think>", "</think>"]}, "</think>")
SEPARATED: dict[str, Any] = {"type": "tags_with_separator", "tags": [CALL, tag("n", NUMBER, "!")], "separator": ","}
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "const_string": ({"type": "const_string", "value": "a\n%b"}, ["a\n%b"], ["a", "a\n%bc", ""]),
    "json_schema": (JSON, [OSLO], ["{}", "x"]),
    "json_schema-any": ({"type": "json_schema", "json_schema": True}, ["[1,2]", "{}"], ["a"]),
    "regex": (NUMBER, ["12/3"], ["12", "a"]),
    "any_text": (ANY, ["", "abc\nd"], []),
    "any_text-excludes": ({"type": "any_text", "excludes": ["bad", "a/b"]}, ["ba d"], ["x bad y", "xa/b"]),
    "sequence": (
        {"type": "sequence", "elements": [{"type": "const_string", "value": "a"}, NUMBER]},
        ["a1/2"],
        ["a", "1/2"],
    ),
    "sequence-text": (
        {"type": "sequence", "elements": [ANY, {"type": "const_string", "value": "--"}, NUMBER]},
        ["free - text--1/2", "--1/2"],
        ["free", "free--", "free--x"],
    ),
    "or": (
        {"type": "or", "elements": [NUMBER, {"type": "const_string", "value": "none"}]},
        ["1/2", "none"],
        ["", "none1/2"],
    ),
    "optional": ({"type": "optional", "content": NUMBER}, ["", "1/2"], ["1/21/2x"]),
    "star": ({"type": "star", "content": {"type": "const_string", "value": "ab"}}, ["", "abab"], ["aba"]),
    "plus": ({"type": "plus", "content": {"type": "const_string", "value": "ab"}}, ["ab", "abab"], ["", "aba"]),
    "repeat": (
        {"type": "repeat", "min": 1, "max": 2, "content": {"type": "const_string", "value": "ab"}},
        ["ab", "abab"],
        ["", "ababab"],
    ),
    "repeat-unbounded": (
        {"type": "repeat", "min": 2, "max": -1, "content": {"type": "const_string", "value": "a"}},
        ["aa", "aaaaa"],
        ["a"],
    ),
    "grammar": (
        {"type": "sequence", "elements": [{"type": "grammar", "grammar": 'root ::= "x" [0-9]+'}, JSON]},
        [f"x12{OSLO}"],
        ["x", OSLO],
    ),
    "tag": (CALL, [CALLED], [f"<tool_call>w:{OSLO}", "text"]),
    "tag-ends": (tag("(", ANY, [")", "]"]), ["(a)", "(a]"], ["(a", "(a)b"]),
    "tag-no-end": (tag("(", NUMBER, ""), ["(1/2"], ["(1/2)"]),
    "triggered_tags": (
        TRIGGERED,
        ["", "free text", CALLED, f"a {CALLED} b {CALLED} c"],
        ["<tool_call>x", f"a <tool_call>w:{OSLO}", f"{CALLED}<tool_call>"],
    ),
    "triggered_tags-required": (
        {**TRIGGERED, "at_least_one": True},
        [CALLED, f"{CALLED} b", f"{CALLED} b {CALLED}", f"{CALLED}{CALLED}"],
        ["", "free text", f"a {CALLED}", f" {CALLED}"],
    ),
    "triggered_tags-first": (
        {**TRIGGERED, "stop_after_first": True},
        ["", "free", f"a {CALLED}"],
        [f"{CALLED} b", f"{CALLED}{CALLED}"],
    ),
    "triggered_tags-one": (
        {**TRIGGERED, "stop_after_first": True, "at_least_one": True},
        [CALLED],
        ["", f"{CALLED} b", f"a {CALLED}"],
    ),
    "tags_with_separator": (SEPARATED, ["", CALLED, f"{CALLED},n1/2!,{CALLED}"], [f"{CALLED},", f"a{CALLED}"]),
    "tags_with_separator-required": ({**SEPARATED, "at_least_one": True}, [CALLED], [""]),
    "tags_with_separator-first": ({**SEPARATED, "stop_after_first": True}, ["", "n1/2!"], ["n1/2!,n1/2!"]),
    "dispatch": (
        {"type": "dispatch", "rules": [["num:", NUMBER]], "loop": True},
        ["", "a", "num:1/2", "a num:1/2 b num:3/4"],
        ["num:", "a num:x"],
    ),
    "dispatch-once": ({"type": "dispatch", "rules": [["num:", NUMBER]], "loop": False}, ["num:1/2"], ["num:1/2 b"]),
    "thought-calls": (
        {
            "type": "sequence",
            "elements": [
                {"type": "sequence", "elements": [THOUGHT, {"type": "const_string", "value": "\n\n"}]},
                {**TRIGGERED, "at_least_one": True, "excludes": ["<think>", "</think>"]},
            ],
        },
        [f"I think.</think>\n\n{CALLED}"],
        ["I think.", f"I think.</think>{CALLED}", f"a<think></think>\n\n{CALLED}", "a</think>\n\nno call"],
    ),
    "calls-in-a-tag": (
        tag("<|open|>", {**SEPARATED, "tags": [CALL], "separator": "", "at_least_one": True}, "<|close|>"),
        [f"<|open|>{CALLED}{CALLED}<|close|>"],
        ["<|open|><|close|>", f"<|open|>{CALLED}"],
    ),
    "triggered-in-a-tag": (
        tag("[", {**TRIGGERED, "triggers": ["<tool", "<tool_call>"]}, "]"),
        ["[]", "[a]", f"[a {CALLED} b]"],
        ["[", "[<tool_call>]", "[a] b"],
    ),
    "channel": (
        {
            "type": "tags_with_separator",
            "tags": [tag("<|open|>final json", JSON, "<|close|>"), tag("<|open|>analysis", ANY, "<|close|>")],
            "separator": "",
            "at_least_one": True,
        },
        [f"<|open|>analysis so<|close|><|open|>final json{OSLO}<|close|>"],
        [f"<|open|>final json{OSLO}", "<|open|>other<|close|>"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("markers", list(COMPILERS))
@pytest.mark.parametrize("case", list(CASES))
def test_a_format_accepts_exactly_its_texts(case: str, markers: str) -> None:
    form, good, bad = CASES[case]
    compiler = COMPILERS[markers]
    assert [text for text in good if not accepts(compiler, form, text)] == []
    assert [text for text in bad if accepts(compiler, form, text)] == []


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(("tag", "triggered", "thought"))])
def test_markers_that_are_no_control_tokens_are_matched_by_their_texts_too(case: str) -> None:
    form, good, bad = CASES[case]
    compiler = COMPILERS["ordinary"]
    assert [text for text in good if not accepts(compiler, form, text, by_token=False)] == []
    assert [text for text in bad if accepts(compiler, form, text, by_token=False)] == []


def test_a_token_is_matched_by_its_id_or_text() -> None:
    compiler = COMPILERS["control"]
    number = compiler._tokenizer.control_tokens["<|open|>"].token_id
    for token in (number, "<|open|>"):
        form = {"type": "tag", "begin": {"type": "token", "token": token}, "content": ANY, "end": "<|close|>"}
        assert accepts(compiler, form, "<|open|>hi<|close|>")
        assert not accepts(compiler, form, "hi<|close|>")
    ends = {"type": "tag", "begin": "a", "content": ANY, "end": {"type": "token", "token": "<|close|>"}}
    assert accepts(compiler, ends, "a b<|close|>")
    assert not accepts(compiler, ends, "a b")


def nested(depth: int) -> dict[str, Any]:
    form: dict[str, Any] = NUMBER
    for _ in range(depth):
        form = {"type": "optional", "content": form}
    return form


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({}, "format has no type"),
        ({"type": "tokens"}, "the type 'tokens'"),
        ({"type": "exclude_token", "exclude_tokens": [1]}, "'exclude_token', which is not supported"),
        ({"type": "const_string", "value": ""}, "format.value"),
        (
            {"type": "json_schema", "json_schema": CITY, "style": "qwen_xml"},
            "format.style 'qwen_xml' is not supported; send the functions as `tools`",
        ),
        ({"type": "json_schema", "json_schema": 1}, "format.json_schema"),
        ({"type": "any_text", "max_tokens": 5}, "format.max_tokens"),
        ({"type": "any_text", "excludes": [""]}, "format.excludes"),
        ({"type": "sequence", "elements": []}, "format.elements"),
        ({"type": "sequence", "elements": [ANY, NUMBER]}, "format.elements.0 is any_text before"),
        ({"type": "star", "content": ANY}, "repeats any_text"),
        ({"type": "repeat", "min": 2, "max": 1, "content": NUMBER}, "format.max"),
        ({"type": "repeat", "min": 0, "max": 10**9, "content": NUMBER}, "1024"),
        ({**TRIGGERED, "triggers": ["<other>"]}, "format.tags.0.begin"),
        ({**TRIGGERED, "tags": [NUMBER]}, "format.tags.0 must have the type tag"),
        ({"type": "tag", "begin": "a", "content": NUMBER, "end": 5}, "format.end"),
        ({"type": "token", "token": "<none>"}, "format.token"),
        ({"type": "dispatch", "rules": [["", NUMBER]]}, "format.rules.0"),
        ({"type": "grammar", "grammar": "root ::= ("}, "GBNF"),
        ({"type": "regex", "pattern": "("}, "regex"),
        (nested(40), "32 levels"),
        ({"type": "or", "elements": [NUMBER] * 512}, "512 formats"),
    ],
)
def test_a_format_that_cannot_be_held_is_refused_by_its_place(form: dict[str, Any], said: str) -> None:
    source = json.dumps({"format": form})
    with pytest.raises(InvalidRequest) as refused:
        COMPILERS["text"].check(Constraint(ConstraintKind.STRUCTURAL_TAG, source))
    assert said in refused.value.message
