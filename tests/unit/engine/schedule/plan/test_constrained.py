"""Constrained sequences in the scheduler: the tokens are those of a masked run in any order of late masks, chunks and
preemptions.
"""

from dataclasses import replace

import numpy as np
import pytest
from harness.fakes.engines import (
    EOS,
    VOCAB,
    a_request,
    an_engine,
    next_allowed,
    next_token,
    run_until_idle,
    small_limits,
)
from harness.fakes.masks import allowed_after, constrained, with_constraint
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import InvalidRequest
from kvferry.core.sampling import FinishReason
from kvferry.engine.schedule.step.step import StepPlan, StepResult


def masked_tokens(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for number in range(count):
        token = next_allowed(next_token(tokens), allowed_after(tokens[len(prompt) :]))
        tokens.append(token)
        if token == EOS:
            break
        assert token % 5 == number % 5
    return tokens[len(prompt) :]


def test_a_late_mask_leaves_its_sequence_out_and_not_the_others() -> None:
    engine, runner = an_engine()
    masks = constrained(engine, [0])
    engine.add(with_constraint(a_request("c", [1, 2, 3], max_tokens=2)))
    engine.add(a_request("free", [4, 5], max_tokens=4))
    masks.made[0].late = 2
    tokens = run_until_idle(engine)
    shares = [[s.request_id for s in plan.scheduled] for plan in runner.steps]
    assert shares[:4] == [["c", "free"], ["free"], ["c", "free"], ["c", "free"]]
    assert [s.num_computed for plan in runner.steps for s in plan.scheduled if s.request_id == "c"] == [0, 2, 3]
    assert tokens["c"] == masked_tokens([1, 2, 3], 2)


def test_an_engine_whose_only_sequence_waits_for_its_mask_runs_no_step() -> None:
    engine, _ = an_engine()
    masks = constrained(engine, [0])
    engine.add(with_constraint(a_request("c", [1, 2, 3], max_tokens=1)))
    masks.made[0].late = 5
    assert engine.step().ran
    assert not engine.step().ran, "without runnable sequences the engine runs no step"
    assert run_until_idle(engine)["c"] == masked_tokens([1, 2, 3], 1)


def test_a_sequence_may_be_aborted_while_it_waits_for_its_mask() -> None:
    engine, _ = an_engine()
    masks = constrained(engine, [0])
    request = with_constraint(a_request("c", [1, 2, 3]))
    engine.add(request)
    masks.made[0].late = 1000
    engine.step()
    engine.abort(request.request_id)
    assert engine.is_idle


def test_an_engine_without_a_tokenizer_rejects_constraints() -> None:
    engine, _ = an_engine()
    with pytest.raises(InvalidRequest) as caught:
        engine.add(with_constraint(a_request("c", [1])))
    assert caught.value.field == "constraint"
    assert engine.is_idle


def test_the_end_of_a_grammar_ends_the_output_even_if_eos_is_ignored() -> None:
    engine, _ = an_engine()
    masks = constrained(engine, [0])
    request = with_constraint(a_request("c", [1, 2, 3], max_tokens=9))
    engine.add(replace(request, sampling=replace(request.sampling, ignore_eos=True)))
    only_end = np.packbits(np.arange(VOCAB) == EOS, bitorder="little")
    masks.made[0].wait = lambda: only_end  # type: ignore[method-assign]
    (update,) = engine.step().updates
    assert (update.tokens[0].token_id, update.finish_reason) == (EOS, FinishReason.STOP)
    assert engine.is_idle


@settings(deadline=None, max_examples=150)
@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=30), min_size=1, max_size=6),
    schedule=st.lists(st.integers(0, 3), min_size=1, max_size=7),
    num_blocks=st.integers(14, 40),
    budget=st.integers(3, 64),
    free=st.sets(st.integers(0, 5)),
)
def test_tokens_are_those_of_a_masked_run_for_any_events(
    prompts: list[list[int]], schedule: list[int], num_blocks: int, budget: int, free: set[int]
) -> None:
    engine, _ = an_engine(num_blocks=num_blocks, limits=small_limits(token_budget=budget))
    constrained(engine, schedule)
    for number, prompt in enumerate(prompts):
        request = a_request(f"r{number}", prompt, max_tokens=8)
        engine.add(request if number in free else with_constraint(request))
    tokens = run_until_idle(engine)
    for number, prompt in enumerate(prompts):
        if number not in free:
            assert tokens[f"r{number}"] == masked_tokens(prompt, 8)
    assert engine.is_idle


def test_a_step_ahead_of_a_postponed_token_does_not_belong_to_its_sequence() -> None:
    """Its row was computed from an arbitrary token, so that not even its error counts."""
    engine, _ = an_engine()
    masks = constrained(engine, [0])
    engine.add(with_constraint(a_request("c", [1, 2, 3])))
    masks.made[0].late = 1000
    (now,) = engine.scheduler.schedule().scheduled
    ahead = replace(now, num_computed=3, num_scheduled=1, mask=masks.made[0].following())
    assert engine.scheduler.has_sequence(ahead)
    engine.scheduler.update(StepPlan((now,)), StepResult({}, postponed=frozenset({now.request_id})))
    assert not engine.scheduler.has_sequence(ahead)
    failed = StepResult({}, failures={now.request_id: InvalidRequest("a logit is not finite", field="prompt")})
    assert engine.scheduler.update(StepPlan((ahead,)), failed) == []
    assert not engine.is_idle
