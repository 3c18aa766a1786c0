"""Markers that are tokens of the vocabulary with or without the flag `special`, as published tokenizers have them."""

import json
import random

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.inference.tools import Tool
from kvferry.text.answers.answer import AnswerForm, AnswerSplitter, SplitOptions
from kvferry.text.answers.marks import HARMONY, MARKERS, Marks
from kvferry.text.answers.registry import CallFormat
from kvferry.text.grammar.compiler import GrammarCompiler
from kvferry.text.tokenizing.byte_level import CHARACTER_OF
from kvferry.text.tokenizing.tokenizer import Detokenizer, Tokenizer
from kvferry.text.tools.grammars import calls_grammar, thought_rules

EOS = "<|end_of_text|>"
OTHER = "<h1>"
"""A token that is text and no marker, as in Gemma's vocabulary."""
QWEN = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Tokens of Qwen 2.5 and 3 without the flag `special`."""
TOOLS = (Tool("w", "", {"type": "object", "properties": {"c": {"type": "string", "maxLength": 5}}, "required": ["c"]}),)


def vocabulary(special: tuple[str, ...], ordinary: tuple[str, ...]) -> Tokenizer:
    def make() -> tokenizers.Tokenizer:
        fast = tokenizers.Tokenizer(models.BPE(vocab={CHARACTER_OF[byte]: byte for byte in range(256)}, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (EOS, *special)])
        fast.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*ordinary, OTHER)])
        return fast

    return Tokenizer(make, vocab_size=256 + 2 + len(special) + len(ordinary), eos_token_ids=(256,))


def marks_of(tokenizer: Tokenizer) -> Marks:
    control = {text: token.token_id for text, token in tokenizer.control_tokens.items()}
    return Marks.of(control, tokenizer.added_tokens)


def answer(tokenizer: Tokenizer, constraint: Constraint, seed: int) -> tuple[list[int], str]:
    """Return the tokens of a random answer, forced ones first, and its text as a splitter gets it."""
    state = GrammarCompiler(tokenizer).compile(constraint).start()
    dice = random.Random(seed)
    ids: list[int] = []
    while len(ids) < 2000:
        step = state.forced_tokens()[:1]
        if not step:
            allowed = np.flatnonzero(state.allowed()).tolist()
            plain = [token for token in allowed if 32 <= token < 127 or token >= 256] or allowed
            closing = [token for token in allowed if token >= 256 or token in b'"}']
            step = [dice.choice(closing if closing and dice.random() < 0.5 else plain)]
        if step[0] in tokenizer.eos_token_ids:
            break
        ids += step
        state.advance(step)
    detokenizer = Detokenizer(tokenizer, marks=marks_of(tokenizer).by_token)
    return ids, detokenizer.feed(ids) + detokenizer.finish()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_special", [True, False], ids=["special", "ordinary"])
@pytest.mark.parametrize("call_format", list(CallFormat))
def test_required_calls_have_the_tokens_of_the_markers(call_format, is_special, seed) -> None:
    texts = (*MARKERS, *HARMONY) if call_format is CallFormat.HARMONY else MARKERS
    tokenizer = vocabulary(texts, ()) if is_special else vocabulary(HARMONY[:1] * (texts != MARKERS), texts)
    marks = marks_of(tokenizer)
    assert set(marks.token_ids) == set(texts)
    thought = thought_rules(marks, is_open=False, call_format=call_format)
    grammar = calls_grammar(call_format, TOOLS, marks, is_single=True, thought=thought)
    ids, text = answer(tokenizer, Constraint(ConstraintKind.GRAMMAR, grammar), seed)
    splitter = AnswerSplitter(
        AnswerForm(call_format, True, marks), SplitOptions(("w",), 1, schemas={"w": TOOLS[0].schema})
    )
    calls = [*splitter.feed(text).calls, *splitter.finish().calls]
    assert calls[0].name == "w"
    assert set(json.loads("".join(call.arguments for call in calls))) >= {"c"}
    if call_format is CallFormat.HERMES:
        assert ids.count(marks.token_ids["<tool_call>"]) == ids.count(marks.token_ids["</tool_call>"]) == 1


@pytest.mark.parametrize("is_special", [True, False], ids=["special", "ordinary"])
def test_a_constraint_after_the_reasoning_begins_with_the_token_that_ends_it(is_special) -> None:
    tokenizer = vocabulary(QWEN, ()) if is_special else vocabulary((), QWEN)
    closer = tokenizer.added_tokens["</think>"]
    constraint = Constraint(ConstraintKind.CHOICE, '["yes"]', after="</think>")
    state = GrammarCompiler(tokenizer).compile(constraint).start()
    state.advance([*b"hm </think", closer])
    assert state.forced_tokens() == [*b"yes"]


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (ConstraintKind.CHOICE, '["a<tool_call>b"]'),
        (ConstraintKind.JSON_SCHEMA, '{"const": "a<tool_call>b"}'),
        (ConstraintKind.REGEX, "a<tool_call>b"),
        (ConstraintKind.GRAMMAR, 'start: "a<tool_call>b"'),
    ],
)
def test_text_with_an_ordinary_marker_can_be_completed(kind, source) -> None:
    tokenizer = vocabulary((), QWEN)
    _, text = answer(tokenizer, Constraint(kind, source), 0)
    assert text.strip('"') == "a<tool_call>b"


def test_a_structural_tag_may_be_triggered_by_an_ordinary_marker() -> None:
    tokenizer = vocabulary((), QWEN)
    tag = {"begin": "<tool_call>", "schema": {"const": 1}, "end": "</tool_call>"}
    source = json.dumps({"structures": [tag], "triggers": ["<tool_call>"]})
    state = GrammarCompiler(tokenizer).compile(Constraint(ConstraintKind.STRUCTURAL_TAG, source)).start()
    state.advance([*b"text", tokenizer.added_tokens["<tool_call>"]])
    state.advance([*b"1"])
    assert set(np.flatnonzero(state.allowed())) == {ord("<"), tokenizer.added_tokens["</tool_call>"]}, "token or text"


def test_other_added_tokens_without_the_flag_are_text() -> None:
    tokenizer = vocabulary((), QWEN)
    state = GrammarCompiler(tokenizer).compile(Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "string"}')).start()
    state.advance([*b'"'])
    token = tokenizer.added_tokens[OTHER]
    assert state.allowed()[token]
    state.advance([token, *b'"'])
    assert state.is_accepting
