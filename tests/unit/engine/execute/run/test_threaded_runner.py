"""Steps on a compute thread: the tokens of synchronous steps, errors on the engine's thread, and no thread left."""

import gc
import threading
import time
import weakref
from dataclasses import replace

import pytest

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvariantBroken
from kvferry.core.sampling import FinishReason, SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.execute.grammar import grammar_masks
from kvferry.engine.execute.run.threaded_runner import ThreadedRunner, TokensAhead
from kvferry.engine.offline.llm import LLM

LETTERS = Constraint(ConstraintKind.REGEX, "[a-z ]{100}")
_PARAMETERS = (
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0.9, top_p=0.9, max_tokens=20, seed=3),
    SamplingParams(temperature=1.2, top_k=40, max_tokens=17, seed=4, logprobs=3),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, max_tokens=30, seed=5),
    SamplingParams(temperature=0, frequency_penalty=0.7, presence_penalty=0.2, max_tokens=9),
    SamplingParams(temperature=0, min_tokens=8, max_tokens=12, prompt_logprobs=2),
    SamplingParams(temperature=0.8, typical_p=0.6, max_tokens=15, seed=6, logit_bias={5: 2.0}),
    SamplingParams(temperature=0.9, max_tokens=20, seed=7, constraint=LETTERS),
    SamplingParams(temperature=0, max_tokens=20, constraint=LETTERS),
    SamplingParams(temperature=0.9, max_tokens=20, seed=8, constraint=Constraint(ConstraintKind.REGEX, "[a-c]{1,3}")),
)
_PROMPTS = [[7 + i, 3, 5 * i + 1, *range(40, 40 + 5 * i)] for i in range(len(_PARAMETERS))]


def _llm(async_steps: str) -> LLM:
    limits = SchedulerLimits(token_budget=32, max_chunk_tokens=16, max_num_seqs=4)
    return LLM("tiny", kv_memory=1 << 20, limits=limits, async_steps=async_steps)


def test_tokens_and_log_probabilities_equal_those_of_synchronous_steps() -> None:
    ahead, synchronous = _llm("on"), _llm("off")
    assert isinstance(ahead.runner, ThreadedRunner)
    assert not isinstance(synchronous.runner, ThreadedRunner)
    found = ahead.generate(_PROMPTS, _PARAMETERS)
    expected = synchronous.generate(_PROMPTS, _PARAMETERS)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.logprobs for c in found] == [c.logprobs for c in expected]
    assert [c.prompt_logprobs for c in found] == [c.prompt_logprobs for c in expected]
    assert ahead.engine.is_idle


def test_steps_are_launched_ahead_with_every_kind_of_sampling() -> None:
    for sampling in _PARAMETERS:
        llm = _llm("on")
        launched: list[bool] = []
        llm.runner.watch = lambda plan, to=launched: to.append(
            any(isinstance(s.token_ids, TokensAhead) for s in plan.scheduled)
        )
        (completion,) = llm.generate([_PROMPTS[1]], replace(sampling, ignore_eos=True))
        is_stopped = completion.finish_reason is FinishReason.STOP  # by a token after whose step one more was launched
        assert sum(launched) == len(completion.token_ids) - 1 + is_stopped, sampling


def test_late_masks_change_no_token_of_steps_that_are_launched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _llm("off").generate(_PROMPTS, _PARAMETERS)
    monkeypatch.setattr(grammar_masks, "INLINE_SECONDS", 0.0)  # threads compute the masks, and steps do not wait
    monkeypatch.setattr(grammar_masks, "OFFLINE_SECONDS", 0.0)
    monkeypatch.setattr("kvferry.engine.build.OFFLINE_SECONDS", 0.0)
    llm = _llm("on")
    found = llm.generate(_PROMPTS, _PARAMETERS)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert llm.engine.masks is not None
    assert llm.engine.masks.num_late > 0
    assert llm.engine.is_idle


def test_a_sequence_that_ends_does_not_delay_the_step_ahead() -> None:
    """Its mask of the step ahead is never computed, and an engine of `LLM` waits for up to a minute for a late mask."""
    sampling = SamplingParams(temperature=0, max_tokens=20, constraint=Constraint(ConstraintKind.REGEX, "[a-c]{3}"))
    llm = _llm("on")
    begun = time.monotonic()
    (completion,) = llm.generate([_PROMPTS[0]], sampling)
    assert completion.finish_reason is FinishReason.STOP
    assert time.monotonic() - begun < grammar_masks.OFFLINE_SECONDS / 2


def test_an_error_of_a_step_is_raised_where_its_result_is_read() -> None:
    llm = _llm("on")

    def fail(*_: object) -> None:
        raise InvariantBroken("the pages are damaged")

    llm.model.compute = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(InvariantBroken, match="the pages are damaged"):
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))


def test_the_thread_ends_with_its_runner() -> None:
    before = set(threading.enumerate())
    llm = _llm("on")
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))
    (thread,) = set(threading.enumerate()) - before
    runner = weakref.ref(llm.runner)
    del llm
    gc.collect()
    assert runner() is None
    thread.join(10)
    assert not thread.is_alive()


def test_a_list_with_a_token_ahead_reads_like_a_list() -> None:
    known = [4, 5, 6]
    ahead = TokensAhead(known)
    ahead.last = 9
    known.append(8)  # the scheduler may append a token at this index before the list is read
    expected = [4, 5, 6, 9]
    assert list(ahead) == expected
    assert len(ahead) == 4
    assert [ahead[i] for i in range(-4, 4)] == [*expected, *expected]
    assert (ahead[-2:], ahead[:2], ahead[1:], ahead[4:]) == ([6, 9], [4, 5], [5, 6, 9], [])
    with pytest.raises(IndexError):
        ahead[4]
