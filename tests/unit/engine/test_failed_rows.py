"""A sequence whose row cannot be sampled ends alone: the others get their tokens, and none of its state is left."""

from collections.abc import Callable

import pytest
from harness.fakes.engines import a_request, an_engine, expected_tokens
from harness.idle import assert_idle

from kvferry.core.errors import GenerationFailed, InvalidRequest, KvferryError
from kvferry.core.ids import RequestId
from kvferry.engine.schedule.step.sampling_plan import none_left, not_finite
from kvferry.engine.schedule.step.step import ScheduledSequence, StepPlan, StepResult

BAD = RequestId("bad")


def failing(run: Callable[[StepPlan], StepResult], error: Callable[[ScheduledSequence], KvferryError], *, at: int):
    """Return `run` with failures: the row of request `bad` fails once the sequence has `at` tokens."""

    def wrapped(plan: StepPlan) -> StepResult:
        result = run(plan)
        failed = {s.request_id: error(s) for s in plan.scheduled if s.request_id == BAD and len(s.token_ids) >= at}
        kept = {name: output for name, output in result.outputs.items() if name not in failed}
        return StepResult(kept, failed)

    return wrapped


@pytest.mark.parametrize(("error", "kind"), [(not_finite, GenerationFailed), (none_left, InvalidRequest)])
@pytest.mark.parametrize("at", [9, 11])
def test_a_failed_row_ends_its_sequence_alone(
    error: Callable[[ScheduledSequence], KvferryError], kind: type[KvferryError], at: int
) -> None:
    engine, runner = an_engine()
    runner.run = failing(runner.run, error, at=at)  # type: ignore[method-assign]
    prompts = {"before": [1, 2, 3], "bad": list(range(9)), "after": list(range(20, 28))}
    for name, prompt in prompts.items():
        engine.add(a_request(name, prompt, max_tokens=8))
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    failures: dict[str, KvferryError] = {}
    while engine.has_work:
        for update in engine.step().updates:
            tokens[update.request_id] += [t.token_id for t in update.tokens]
            if update.error is not None:
                assert update.tokens == ()
                assert update.finish_reason is None
                failures[update.request_id] = update.error
        engine.check_integrity()
    assert {name: type(failure) for name, failure in failures.items()} == {"bad": kind}
    assert tokens["bad"] == expected_tokens(prompts["bad"], 8)[: at - 9]
    for name in ("before", "after"):
        assert tokens[name] == expected_tokens(prompts[name], 8)
    assert_idle(engine)


def test_blocks_of_a_failed_sequence_are_not_reused() -> None:
    """A block of the failed sequence may be damaged, so a later request with the same prompt would fail too."""
    engine, runner = an_engine()
    whole = runner.run
    runner.run = failing(whole, not_finite, at=9)  # type: ignore[method-assign]
    prompt = list(range(9))
    engine.add(a_request("bad", prompt))
    while engine.has_work:
        engine.step()
    assert len(engine.allocator.index) == 0
    runner.run = whole  # type: ignore[method-assign]
    engine.add(a_request("next", prompt, max_tokens=2))
    updates = [update for _ in range(2) for update in engine.step().updates]
    assert [update.num_cached for update in updates] == [0, 0]
    assert [t.token_id for u in updates for t in u.tokens] == expected_tokens(prompt, 2)
    assert_idle(engine)
