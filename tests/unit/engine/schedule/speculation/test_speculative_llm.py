"""Drafts change no token of a real model: every kind of sampling, alone and in a batch, with constraints and on a
compute thread.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import KvferryError
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine import LLM
from kvferry.engine.schedule.speculation.draft_lengths import WholeDrafts
from kvferry.engine.schedule.speculation.matches import Tokens
from kvferry.engine.schedule.speculation.proposers import Draft
from kvferry.engine.schedule.speculation.speculation import Speculation
from kvferry.engine.schedule.step.step import StepPlan

PARAMETERS = (
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0.9, top_p=0.9, max_tokens=20, seed=3),
    SamplingParams(temperature=1.2, top_k=40, max_tokens=17, seed=4, logprobs=3),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, max_tokens=30, seed=5),
    SamplingParams(temperature=0, frequency_penalty=0.7, presence_penalty=0.2, max_tokens=26),
    SamplingParams(temperature=0, min_tokens=8, max_tokens=24, prompt_logprobs=2),
    SamplingParams(temperature=0.8, typical_p=0.6, max_tokens=15, seed=6, logit_bias={5: 2.0}),
    SamplingParams(temperature=0.5, seed=8, max_tokens=20, bad_words=("e", "th"), allowed_token_ids=tuple(range(256))),
    SamplingParams(temperature=0, max_tokens=30, constraint=Constraint(ConstraintKind.REGEX, "(ab|cd)*[0-9]{3} end")),
    SamplingParams(
        temperature=0.8,
        seed=9,
        max_tokens=40,
        constraint=Constraint(ConstraintKind.JSON_SCHEMA, '{"type":"object","properties":{"name":{"enum":["x"]}}}'),
    ),
)
PROMPTS = [[*b"abcabcabc abc", 40 + i, *range(40, 40 + 5 * i)] for i in range(len(PARAMETERS))]


class Known:
    """Proposes the continuation from the known outputs, with occasional wrong tokens."""

    def __init__(self, known: Sequence[Sequence[int]]) -> None:
        self._known = [np.array(tokens, np.int32) for tokens in known]
        self._turn = 0

    def propose(self, tokens: Tokens, limit: int) -> Draft:
        self._turn += 1
        for known in self._known:
            if np.array_equal(known[: len(tokens)], tokens):
                draft = known[len(tokens) : len(tokens) + limit].tolist()
                if self._turn % 3 == 0 and draft:
                    draft[self._turn % len(draft)] = 7
                return Draft(tuple(draft), 4)
        return Draft((7,) * limit, 1)


def a_model(speculation: str = "off", *, async_steps: str = "on", dtype: str = "float32") -> LLM:
    limits = SchedulerLimits(token_budget=64, max_chunk_tokens=16, max_num_seqs=4)
    return LLM("tiny", dtype=dtype, kv_memory=1 << 20, limits=limits, async_steps=async_steps, speculation=speculation)


def speculate(llm: LLM, known: Sequence[Sequence[int]]) -> Speculation:
    """Give an engine the proposer `Known`."""
    speculation = Speculation(Known(known), WholeDrafts(), num_drafts=6)
    llm.engine.scheduler.drafting.speculation = speculation
    return speculation


@pytest.mark.parametrize("async_steps", ["on", "off"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_of_sampling_gives_the_tokens_of_a_run_without_drafts(async_steps: str, dtype: str) -> None:
    expected = a_model(dtype=dtype).generate(PROMPTS, PARAMETERS)
    llm = a_model(async_steps=async_steps, dtype=dtype)
    speculation = speculate(llm, [p + list(c.token_ids) for p, c in zip(PROMPTS, expected, strict=True)])
    drafted: set[str] = set()

    def watch(plan: StepPlan) -> None:
        drafted.update(str(s.request_id) for s in plan.scheduled if s.num_drafts)

    llm.runner.watch = watch
    found = llm.generate(PROMPTS, PARAMETERS)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.text for c in found] == [c.text for c in expected]
    assert [c.logprobs for c in found] == [c.logprobs for c in expected]
    assert [c.prompt_logprobs for c in found] == [c.prompt_logprobs for c in expected]
    assert speculation.counts.num_accepted_tokens > 40
    num_constrained = sum(params.constraint is not None for params in PARAMETERS)  # a late mask may prevent drafts
    assert len(drafted) >= len(PROMPTS) - num_constrained, "each kind of sampling had drafts"
    assert llm.engine.is_idle
    assert speculation.is_idle


@pytest.mark.parametrize("method", ["auto", "suffix", "ngram?k=4&min=1"])
def test_each_method_with_a_real_model(method: str) -> None:
    free = [p for p in PARAMETERS if p.constraint is None]
    expected = a_model().generate(PROMPTS[: len(free)], free)
    llm = a_model(method)
    found = llm.generate(PROMPTS[: len(free)], free)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert llm.engine.speculation is not None
    assert llm.engine.speculation.is_idle


def test_a_forced_text_is_drafted() -> None:
    constraint = Constraint(ConstraintKind.REGEX, "the quick brown fox jumps over the lazy dog[.]")
    params = SamplingParams(temperature=0, max_tokens=60, constraint=constraint)
    expected = a_model().generate([PROMPTS[0]], params)
    llm = a_model("suffix")  # whole drafts are verified, so the durations of steps have no effect
    steps: list[int] = []
    llm.runner.watch = lambda plan: steps.append(plan.num_tokens)
    assert llm.generate([PROMPTS[0]], params)[0].token_ids == expected[0].token_ids
    assert len(steps) < len(expected[0].token_ids)


@pytest.mark.parametrize("async_steps", ["on", "off"])
@pytest.mark.parametrize("speculation", ["draft=tiny?k=4&fixed=1", "draft=tiny?k=8"])
def test_a_draft_model_gives_the_tokens_of_a_run_without(speculation: str, async_steps: str) -> None:
    """The model is its own draft model, so greedy drafts are right. Prompts exceed the chunk of the draft model."""
    free = [p for p in PARAMETERS if p.constraint is None]
    prompts = [p * 3 for p in PROMPTS[: len(free)]]
    expected = a_model().generate(prompts, free)
    llm = a_model(speculation, async_steps=async_steps)
    found = llm.generate(prompts, free)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.logprobs for c in found] == [c.logprobs for c in expected]
    assert llm.engine.speculation is not None
    assert llm.engine.is_idle
    assert llm.engine.speculation.is_idle
    if "fixed" in speculation:
        counts = llm.engine.speculation.counts
        assert counts.num_accepted_tokens > 40
        assert max(counts.accepted_by_position[:4]) > 0


def test_greedy_drafts_of_the_model_itself_are_all_accepted() -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = a_model().generate([PROMPTS[0]], params)
    llm = a_model("draft=tiny?k=4&fixed=1")
    steps: list[int] = []
    llm.runner.watch = lambda plan: steps.append(plan.num_tokens)
    assert llm.generate([PROMPTS[0]], params)[0].token_ids == expected[0].token_ids
    assert llm.engine.speculation is not None
    counts = llm.engine.speculation.counts
    assert counts.num_accepted_tokens > 0.7 * counts.num_draft_tokens, "only drafts of low confidence are rejected"
    assert len(steps) < 20


@pytest.mark.parametrize(
    ("speculation", "message"),
    [("draft=smollm2-135m-instruct", "its vocabulary has 49152 tokens instead of 259"), ("draft=/none", "/none")],
)
def test_a_draft_model_that_does_not_fit_is_refused_by_name(speculation: str, message: str) -> None:
    with pytest.raises(KvferryError, match=message):
        a_model(speculation)
