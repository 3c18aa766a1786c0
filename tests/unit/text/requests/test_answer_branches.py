"""One grammar for an answer: reasoning, then calls or the text of a constraint, in every format of calls."""

import json
import random
from collections import Counter
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.core.inference.tool_calls import AssembledCalls
from kvferry.core.inference.tools import Tool, ToolMode, ToolUse
from kvferry.core.sampling import SamplingParams
from kvferry.text.answers.answer import AnswerForm, AnswerSplitter
from kvferry.text.answers.marks import HARMONY, MARKERS, Marks
from kvferry.text.answers.registry import CallFormat
from kvferry.text.grammar.compiler import GrammarCompiler
from kvferry.text.requests.answer_rules import answer_rules
from kvferry.text.tokenizing.byte_level import CHARACTER_OF
from kvferry.text.tokenizing.tokenizer import Detokenizer, Tokenizer

ARGUMENTS = {"type": "object", "properties": {"c": {"type": "string", "maxLength": 4}}, "required": ["c"]}
ANSWER = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 3}, "n": {"enum": [1, 2]}},
    "required": ["text", "n"],
    "additionalProperties": False,
}
USE = ToolUse((Tool("w", "", ARGUMENTS), Tool("v", "", {})))
PARAMETERS = {tool.name: dict(tool.parameters) for tool in USE.tools}
SCHEMA = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(ANSWER))
NUM_ANSWERS = 24


def vocabulary(*, is_special: bool, is_harmony: bool) -> Tokenizer:
    markers = (*MARKERS, *HARMONY) if is_harmony else MARKERS
    added = [AddedToken(text, special=is_special, normalized=False) for text in markers]

    def make() -> tokenizers.Tokenizer:
        fast = tokenizers.Tokenizer(models.BPE(vocab={CHARACTER_OF[byte]: byte for byte in range(256)}, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        fast.add_special_tokens([AddedToken("<|eos|>", special=True, normalized=False)])
        (fast.add_special_tokens if is_special else fast.add_tokens)(added)
        return fast

    return Tokenizer(make, vocab_size=257 + len(markers), eos_token_ids=(256,))


def form_of(tokenizer: Tokenizer, call_format: CallFormat, *, has_reasoning: bool) -> AnswerForm:
    control = {text: token.token_id for text, token in tokenizer.control_tokens.items()}
    return AnswerForm(call_format, has_reasoning, Marks.of(control, tokenizer.added_tokens))


def random_text(
    tokenizer: Tokenizer, compiler: GrammarCompiler, constraint: Constraint, marks: Marks, seed: int
) -> str:
    """Return a random output of a constraint, as the splitter of answers gets it."""
    state = compiler.compile(constraint).start()
    dice = random.Random(seed)
    ids: list[int] = []
    while len(ids) < 4000:
        allowed = np.flatnonzero(state.allowed()).tolist()
        closing = [token for token in allowed if token >= 256 or token in b'"}']
        plain = [token for token in allowed if 32 <= token < 127 or token >= 256]
        token = dice.choice(closing if closing and dice.random() < 0.4 else plain or allowed)
        if token == 256:
            break
        ids.append(token)
        state.advance([token])
    else:
        pytest.fail("the answer does not end")
    detokenizer = Detokenizer(tokenizer, marks=marks.by_token)
    return detokenizer.feed(ids) + detokenizer.finish()


def draw(call_format: CallFormat, reasoning: str, seeds: range, *, is_special: bool) -> Counter[str]:
    """Check that each of some random answers is valid; return how many have a thought, calls, or text."""
    tokenizer = vocabulary(is_special=is_special, is_harmony=call_format is CallFormat.HARMONY)
    form = form_of(tokenizer, call_format, has_reasoning=reasoning != "none")
    sampling, split = answer_rules(form, USE, SamplingParams(constraint=SCHEMA), is_open=reasoning == "opened")
    assert sampling.constraint is not None
    assert split is not None
    compiler, seen = GrammarCompiler(tokenizer), Counter[str]()
    for seed in seeds:
        text = random_text(tokenizer, compiler, sampling.constraint, form.marks, seed)
        splitter = AnswerSplitter(form, split)
        parts = [splitter.feed(text), splitter.finish()]
        content = "".join(part.content for part in parts)
        calls = AssembledCalls()
        for part in parts:
            calls.add(part.calls)
        seen["thought"] += any(part.reasoning for part in parts)
        if whole := calls.whole():
            seen["calls"] += 1
            assert not content.strip(), text
            for call in whole:
                assert call.name in PARAMETERS, text
                jsonschema.validate(json.loads(call.arguments), {"type": "object", **PARAMETERS[call.name]})
        else:
            seen["text"] += 1
            jsonschema.validate(json.loads(content), ANSWER)
    return seen


ANSWERS = [
    pytest.param(call_format, reasoning, id=f"{call_format}-{reasoning}")
    for call_format in CallFormat
    for reasoning in ("none", "own", "opened")
    if (call_format, reasoning) != (CallFormat.HARMONY, "opened")  # its prompts never open the reasoning
]


@pytest.mark.parametrize("is_special", [True, False], ids=["special", "ordinary"])
@pytest.mark.parametrize(("call_format", "reasoning"), ANSWERS)
def test_each_branch_is_reachable_and_valid(call_format, reasoning, is_special) -> None:
    seen = draw(call_format, reasoning, range(NUM_ANSWERS), is_special=is_special)
    assert seen["calls"], seen
    assert seen["text"], seen
    assert bool(seen["thought"]) == (reasoning != "none"), seen


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("call_format", list(CallFormat))
def test_ten_thousand_random_answers_are_valid(call_format) -> None:
    modes = [each.values[1] for each in ANSWERS if each.values[0] is call_format]
    seeds = -(-10_000 // (2 * len(modes)))
    seen = Counter[str]()
    for reasoning in modes:
        for is_special in (True, False):
            seen += draw(call_format, reasoning, range(100, 100 + seeds), is_special=is_special)
    assert seen["calls"] + seen["text"] >= 10_000
    assert min(seen["calls"], seen["text"], seen["thought"]) >= 500, seen


@pytest.mark.parametrize("call_format", list(CallFormat))
def test_a_required_call_leaves_the_schema_to_a_later_answer(call_format) -> None:
    tokenizer = vocabulary(is_special=False, is_harmony=call_format is CallFormat.HARMONY)
    form = form_of(tokenizer, call_format, has_reasoning=True)
    use = replace(USE, choice=ToolMode.REQUIRED)
    sampling, split = answer_rules(form, use, SamplingParams(constraint=SCHEMA), is_open=False)
    assert sampling.constraint is not None
    assert split is not None
    compiler = GrammarCompiler(tokenizer)
    for seed in range(4):
        text = random_text(tokenizer, compiler, sampling.constraint, form.marks, seed)
        splitter = AnswerSplitter(form, split)
        assert [*splitter.feed(text).calls, *splitter.finish().calls], text


def test_a_tool_with_a_schema_that_cannot_be_enforced_may_be_called_with_any_arguments() -> None:
    tokenizer = vocabulary(is_special=True, is_harmony=False)
    form = form_of(tokenizer, CallFormat.HERMES, has_reasoning=False)
    tool = Tool("f", "", {"type": "object", "properties": {"n": {"const": 1 << 60}}})
    sampling, _ = answer_rules(form, ToolUse((tool,)), SamplingParams(constraint=SCHEMA), is_open=False)
    assert sampling.constraint is not None
    GrammarCompiler(tokenizer).check(sampling.constraint)


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(ConstraintKind.JSON_OBJECT, ""),
        Constraint(ConstraintKind.REGEX, "[ab]{2}"),
        Constraint(ConstraintKind.CHOICE, '["<a>", "b"]'),
        Constraint(ConstraintKind.GRAMMAR, 'start: "x" y\ny: "z"'),
        Constraint(ConstraintKind.GRAMMAR, 'root ::= "x" | "y"'),
        SCHEMA,
    ],
    ids=lambda constraint: f"{constraint.kind}-{constraint.source[:8]}",
)
def test_every_kind_of_constraint_follows_reasoning(constraint) -> None:
    tokenizer = vocabulary(is_special=False, is_harmony=False)
    form = form_of(tokenizer, CallFormat.HERMES, has_reasoning=True)
    sampling, split = answer_rules(form, ToolUse(), SamplingParams(constraint=constraint), is_open=True)
    assert sampling.constraint is not None
    assert split is not None
    alone, compiler = GrammarCompiler(tokenizer), GrammarCompiler(tokenizer)
    for seed in range(3):
        text = random_text(tokenizer, compiler, sampling.constraint, form.marks, seed)
        _, closer, answer = text.partition("</think>")
        assert closer
        state = alone.compile(constraint).start()
        state.advance([*answer.strip("\n").encode()])
        assert state.is_accepting


def test_without_tools_and_reasoning_a_constraint_stays_alone() -> None:
    tokenizer = vocabulary(is_special=False, is_harmony=False)
    form = form_of(tokenizer, CallFormat.HERMES, has_reasoning=False)
    assert answer_rules(form, ToolUse(), SamplingParams(constraint=SCHEMA), is_open=False) == (
        SamplingParams(constraint=SCHEMA),
        None,
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "w", "parameters": {"c": "x"}}',
        '{"name": "w", "n": 1}',
        '{"name":"wx","n":2}',
        '{"name": "", "n": 2}',
        '{"name": "v", "parameters": {}}; {"name": "w", "parameters": {"c": ""}}',
    ],
)
def test_an_answer_of_llama_may_begin_like_a_call(text) -> None:
    tokenizer = vocabulary(is_special=True, is_harmony=False)
    form = form_of(tokenizer, CallFormat.LLAMA3_JSON, has_reasoning=False)
    schema = {**ANSWER, "properties": {"name": {"type": "string"}, "n": {"enum": [1, 2]}}, "required": ["name", "n"]}
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    sampling, _ = answer_rules(form, USE, SamplingParams(constraint=constraint), is_open=False)
    assert sampling.constraint is not None
    state = GrammarCompiler(tokenizer).compile(sampling.constraint).start()
    state.advance([*text.encode()])
    assert state.is_accepting


BUDGET = 6


def reasoning_of(state, form: AnswerForm, closer: int, opening: list[int]) -> list[int]:
    """Think for as long as the constraint permits; return the tokens between the marks."""
    state.advance(opening)
    thought: list[int] = []
    while state.allowed()[ord("a")]:
        thought.append(ord("a"))
        state.advance([ord("a")])
        assert len(thought) <= BUDGET
    assert state.forced_tokens()[:1] == [closer]
    state.advance([closer])
    return thought


@pytest.mark.parametrize("is_special", [True, False], ids=["special", "ordinary"])
@pytest.mark.parametrize("answer", ["free", "tools", "required", "schema"])
@pytest.mark.parametrize("call_format", list(CallFormat))
def test_reasoning_ends_at_its_budget_and_the_answer_follows(call_format, answer, is_special) -> None:
    is_harmony = call_format is CallFormat.HARMONY
    tokenizer = vocabulary(is_special=is_special, is_harmony=is_harmony)
    form = form_of(tokenizer, call_format, has_reasoning=True)
    use = {
        "tools": USE,
        "required": replace(USE, choice=ToolMode.REQUIRED),
    }.get(answer, ToolUse(()))
    sampling = SamplingParams(constraint=SCHEMA if answer == "schema" else None)
    marks = form.marks.token_ids
    if is_harmony:
        opening = [marks[HARMONY[0]], *b"analysis", marks[HARMONY[1]]]
        closer = marks[HARMONY[4]]
    else:
        opening, closer = [marks["<think>"]], marks["</think>"]
    for is_open in (False,) if is_harmony else (False, True):
        limited, split = answer_rules(form, use, sampling, is_open=is_open, max_reasoning_tokens=BUDGET)
        assert limited.constraint is not None
        assert split is not None
        state = GrammarCompiler(tokenizer).compile(limited.constraint).start()
        thought = reasoning_of(state, form, closer, [] if is_open else opening)
        assert len(thought) == BUDGET
        if is_harmony:
            state.advance([marks[HARMONY[3]], *b"assistant", marks[HARMONY[0]]])
            assert state.allowed()[ord("a")] == 0, "a second analysis would not be limited"
        elif answer in ("free", "tools"):
            for token in (*b"a", marks.get("<tool_call>", ord("b")), 200):
                assert state.allowed()[token], "the answer has any tokens"
                state.advance([token])
            assert state.allowed()[256]


def test_a_budget_of_zero_ends_the_reasoning_at_once() -> None:
    tokenizer = vocabulary(is_special=True, is_harmony=False)
    form = form_of(tokenizer, CallFormat.HERMES, has_reasoning=True)
    sampling, _ = answer_rules(form, ToolUse(()), SamplingParams(), is_open=True, max_reasoning_tokens=0)
    assert sampling.constraint is not None
    state = GrammarCompiler(tokenizer).compile(sampling.constraint).start()
    assert state.forced_tokens()[:1] == [form.marks.token_ids["</think>"]]


def test_an_answer_without_reasoning_is_free_but_cannot_open_it() -> None:
    tokenizer = vocabulary(is_special=True, is_harmony=False)
    form = form_of(tokenizer, CallFormat.HERMES, has_reasoning=True)
    sampling, _ = answer_rules(form, ToolUse(()), SamplingParams(), is_open=False, max_reasoning_tokens=BUDGET)
    assert sampling.constraint is not None
    state = GrammarCompiler(tokenizer).compile(sampling.constraint).start()
    assert state.allowed()[256], "an empty answer"
    state.advance([*b"yes"])
    assert state.allowed()[256]


def test_without_reasoning_a_budget_has_no_effect_and_marks_of_text_are_refused() -> None:
    tokenizer = vocabulary(is_special=True, is_harmony=False)
    plain = form_of(tokenizer, CallFormat.HERMES, has_reasoning=False)
    sampling, _ = answer_rules(plain, ToolUse(()), SamplingParams(), is_open=False, max_reasoning_tokens=BUDGET)
    assert sampling == SamplingParams()
    textual = AnswerForm(CallFormat.HERMES, True, Marks({}))
    with pytest.raises(InvalidRequest, match="since <think>, </think> is text and no token") as caught:
        answer_rules(textual, ToolUse(()), SamplingParams(), is_open=False, max_reasoning_tokens=BUDGET)
    assert caught.value.field == "thinking_token_budget"


@pytest.mark.parametrize("is_special", [True, False], ids=["special", "ordinary"])
@pytest.mark.parametrize(
    ("call_format", "parts"),
    [
        (CallFormat.HERMES, ["\n", "<think>"]),
        (CallFormat.HERMES, ["<", "think>"]),
        (CallFormat.HERMES, [" ", "<", "think>"]),
        (CallFormat.HERMES, ["<think>", "a", "</think>", "<think>"]),
        (CallFormat.HARMONY, [*HARMONY[:1], "final", HARMONY[1], "a", HARMONY[4], HARMONY[3], "assistant", HARMONY[0],
                              "analysis", HARMONY[1]]),
        (CallFormat.HARMONY, [HARMONY[0], "commentary", HARMONY[0], "analysis", HARMONY[1]]),
        (CallFormat.HARMONY, [HARMONY[0], "finalanalysis", HARMONY[1]]),
    ],
)  # fmt: skip
def test_no_other_way_leads_to_reasoning_beyond_the_budget(call_format, parts, is_special) -> None:
    tokenizer = vocabulary(is_special=is_special, is_harmony=call_format is CallFormat.HARMONY)
    form = form_of(tokenizer, call_format, has_reasoning=True)
    sampling, split = answer_rules(form, ToolUse(()), SamplingParams(), is_open=False, max_reasoning_tokens=BUDGET)
    assert sampling.constraint is not None
    assert split is not None
    state = GrammarCompiler(tokenizer).compile(sampling.constraint).start()
    written: list[int] = []
    for token in (one for part in (*parts, "z" * 40) for one in ids_of(form, part)):
        if not state.allowed()[token]:
            break
        state.advance([token])
        written.append(token)
    detokenizer = Detokenizer(tokenizer, marks=form.marks.by_token)
    splitter = AnswerSplitter(form, split)
    text = detokenizer.feed(written) + detokenizer.finish()
    found = [splitter.feed(text), splitter.finish()]
    assert len("".join(part.reasoning for part in found)) <= BUDGET, written


def ids_of(form: AnswerForm, text: str) -> list[int]:
    token = form.marks.token_ids.get(text)
    return [*text.encode()] if token is None else [token]
