"""Steps launched before the previous result is read give the same tokens and leave no state; a step that depends on
sampled tokens is launched later.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from harness.fakes.engines import EOS, VOCAB, ArithmeticRunner, an_engine, expected_tokens, next_token, small_limits
from harness.fakes.loaders import HeldLoader

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SampledToken, SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.plan.pipeline import Pipeline
from kvferry.engine.schedule.step.kv_progress import RemoteKv
from kvferry.engine.schedule.step.sampling_plan import needs_host
from kvferry.engine.schedule.step.step import SequenceOutput, StepPlan, StepResult


class Late:
    """A step whose tokens are computed at its launch and returned when its result is read."""

    def __init__(self, result: StepResult, runner: "AheadArithmetic") -> None:
        self._result, self._runner = result, runner

    def result(self) -> StepResult:
        self._runner.unread -= 1
        if self._runner.is_broken:
            raise InvariantBroken("a logit is not a finite number")
        return self._result


class AheadArithmetic(ArithmeticRunner):
    """Keeps the tokens that it sampled last, as a device does, because the host's lists may lack the last token."""

    def __init__(self, num_blocks: int, block_tokens: int, stops: Sequence[int] = ()) -> None:
        super().__init__(num_blocks, block_tokens)
        self.unread = self.most_unread = self.read_before_begin = 0
        self.is_broken = False
        self.stops = stops
        self._drawn: dict[tuple[int, int], int] = {}

    def begin(self, plan: StepPlan) -> Late:
        self.read_before_begin += not self.unread
        self.unread += 1
        self.most_unread = max(self.most_unread, self.unread)
        self.steps.append(plan)
        tokens: dict[RequestId, SequenceOutput] = {}
        for s in plan.scheduled:
            for position in range(s.num_computed, s.num_computed + s.num_scheduled):
                block, slot = divmod(position, self.block_tokens)
                token = self._drawn.get((s.table_version, position))
                self.pages[s.block_ids[block]][slot] = s.token_ids[position] if token is None else token
        for s in plan.scheduled:
            if s.num_sampled:
                end = s.num_computed + s.num_scheduled
                read = [self.pages[s.block_ids[p // self.block_tokens]][p % self.block_tokens] for p in range(end)]
                assert None not in read
                drawn = next_token([t for t in read if t is not None])
                if end in self.stops:
                    drawn = EOS
                self._drawn[s.table_version, end] = drawn
                tokens[s.request_id] = SequenceOutput((SampledToken(drawn),), s.num_scheduled)
        return Late(StepResult(tokens), self)

    def may_follow(self, plan: StepPlan) -> bool:
        if any(map(needs_host, plan.scheduled)):
            return False
        return all((s.table_version, s.num_computed) in self._drawn for s in plan.scheduled)


def ahead_engine(num_blocks: int = 64, stops: Sequence[int] = (), limits: SchedulerLimits | None = None) -> tuple[
    Engine, AheadArithmetic
]:  # fmt: skip
    engine, _ = an_engine(num_blocks=num_blocks, limits=limits)
    runner = AheadArithmetic(num_blocks, 4, stops)
    engine._pipeline = Pipeline(runner, engine.allocator)
    return engine, runner


def engine_request(name: str, prompt: list[int], max_tokens: int = 12, **sampling: object) -> EngineRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **sampling})  # type: ignore[arg-type]
    return EngineRequest(RequestId(name), prompt, params)


def run(engine: Engine, most: int = 400) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for _ in range(most):
        if not engine.has_work:
            break
        for update in engine.step().updates:
            tokens.setdefault(update.request_id, []).extend(t.token_id for t in update.tokens)
        engine.check_integrity()
    return tokens


def test_tokens_are_the_same_and_most_steps_are_ahead() -> None:
    engine, runner = ahead_engine()
    prompts = {"a": [1, 2, 3], "b": [9] * 9, "c": [4]}
    for name, prompt in prompts.items():
        engine.add(engine_request(name, prompt))
    assert run(engine) == {name: expected_tokens(prompt, 12) for name, prompt in prompts.items()}
    assert runner.most_unread == 2
    assert runner.unread == 0
    assert len(runner.steps) == 12, "the number of tokens is known in advance, so no superfluous step runs"
    assert engine.is_idle


def test_a_stop_makes_one_step_superfluous_and_leaves_no_state() -> None:
    engine, runner = ahead_engine(stops=[8])
    engine.add(engine_request("a", [1, 2, 3]))
    engine.add(engine_request("b", [5, 6]))
    tokens = run(engine)
    assert tokens == {"a": [*expected_tokens([1, 2, 3], 5), EOS], "b": [*expected_tokens([5, 6], 6), EOS]}
    assert engine.is_idle
    engine.add(engine_request("c", [1, 2, 3], max_tokens=3))
    assert run(engine) == {"c": expected_tokens([1, 2, 3], 3)}
    assert runner.unread == 0
    assert engine.is_idle


@pytest.mark.parametrize("reused", [False, True])
def test_an_abort_between_two_steps_and_its_name_used_again(reused: bool) -> None:
    engine, runner = ahead_engine()
    engine.add(engine_request("a", [1, 2, 3]))
    engine.add(engine_request("b", [7, 7]))
    for _ in range(4):
        engine.step()
    assert runner.unread == 1
    assert engine.abort(RequestId("a"))
    if reused:
        engine.add(engine_request("a", [8, 8, 8, 8, 8], max_tokens=4))
    tokens = run(engine)
    assert tokens["b"] == expected_tokens([7, 7], 12)[4:]
    assert tokens.get("a") == (expected_tokens([8] * 5, 4) if reused else None)
    assert (engine.is_idle, runner.unread) == (True, 0)


def test_an_abort_of_all_requests_waits_for_the_running_step() -> None:
    engine, runner = ahead_engine()
    engine.add(engine_request("a", [1, 2, 3]))
    for _ in range(3):
        engine.step()
    engine.abort(RequestId("a"))
    assert engine.load().blocks_quarantined == 1, "the running step writes to the sequence's last page"
    assert run(engine) == {}
    assert engine.is_idle
    engine.add(engine_request("b", [1, 2, 3, 4, 5, 6], max_tokens=3))
    assert run(engine) == {"b": expected_tokens([1, 2, 3, 4, 5, 6], 3)}
    assert runner.unread == 0


def test_without_free_pages_steps_are_not_launched_ahead() -> None:
    limits = SchedulerLimits(token_budget=64, max_chunk_tokens=64, max_num_seqs=8, reserve_share=0.0)
    engine, runner = ahead_engine(num_blocks=9, limits=limits)
    prompts = {"a": [1, 2, 3], "b": [4, 5, 6, 7], "c": [8, 9]}
    for name, prompt in prompts.items():
        engine.add(engine_request(name, prompt, max_tokens=14))
    assert run(engine) == {name: expected_tokens(prompt, 14) for name, prompt in prompts.items()}
    assert engine.scheduler.num_preemptions > 0
    assert (engine.is_idle, runner.unread) == (True, 0)


@pytest.mark.parametrize("sampling", [{"frequency_penalty": 0.5}, {"logprobs": 1}, {"repetition_penalty": 1.5}])
def test_a_step_that_depends_on_tokens_is_not_launched_ahead(sampling: dict[str, object]) -> None:
    engine, runner = ahead_engine()
    engine.add(engine_request("a", [1, 2, 3], **sampling))
    run(engine)
    assert runner.most_unread == 1


def test_end_tokens_are_banned_for_as_long_as_they_must_be() -> None:
    engine, runner = ahead_engine()
    engine.add(engine_request("a", [1, 2, 3], max_tokens=6, min_tokens=3))
    run(engine)
    assert [bool(p.scheduled[0].banned_token_ids) for p in runner.steps] == [True] * 3 + [False] * 3


def test_steps_run_ahead_while_a_request_waits_and_admission_is_tried_at_intervals() -> None:
    engine, runner = ahead_engine(limits=small_limits(max_num_seqs=1))
    engine.add(engine_request("a", [1], max_tokens=25))
    engine.add(engine_request("b", [2], max_tokens=4))
    attempts = 0
    schedule = engine.scheduler.schedule

    def counted() -> StepPlan:
        nonlocal attempts
        attempts += 1
        return schedule()

    engine.scheduler.schedule = counted  # type: ignore[method-assign]
    assert run(engine) == {"a": expected_tokens([1], 25), "b": expected_tokens([2], 4)}
    assert [len(p.scheduled) for p in runner.steps] == [1] * 29
    assert attempts == 4, "scheduled for the first step, at steps 10 and 19, and for the first step of b"


def test_an_arrival_ends_the_steps_ahead() -> None:
    engine, runner = ahead_engine()
    engine.add(engine_request("a", [1]))
    for _ in range(3):
        engine.step()
    engine.add(engine_request("b", [2], max_tokens=3))
    engine.step()
    engine.step()
    assert [len(p.scheduled) for p in runner.steps] == [1, 1, 1, 1, 2, 2], (
        "the step that was launched ahead has one sequence, the next steps have both"
    )
    assert run(engine)["b"] == expected_tokens([2], 3)[1:]


def test_a_sequence_that_ends_for_certain_does_not_stop_the_others() -> None:
    engine, runner = ahead_engine()
    engine.add(engine_request("a", [1, 2, 3], max_tokens=4))
    engine.add(engine_request("b", [5, 6], max_tokens=9))
    assert run(engine) == {"a": expected_tokens([1, 2, 3], 4), "b": expected_tokens([5, 6], 9)}
    assert [len(p.scheduled) for p in runner.steps] == [2] * 4 + [1] * 5
    assert runner.read_before_begin == 1, "every step but the first was launched ahead"


def test_a_page_that_a_running_step_writes_to_is_no_target_of_a_load() -> None:
    engine, _ = ahead_engine(num_blocks=4)
    loader = HeldLoader(engine)
    engine.add(engine_request("a", [1, 2, 3]))
    for _ in range(3):
        engine.step()
    (written,) = (sequence.kv.table for sequence in engine.scheduler.sequences)
    page = written.blocks[-1]
    engine.abort(RequestId("a"))
    engine.add(replace(engine_request("b", [1] * 9, max_tokens=1), num_generated=1, remote=RemoteKv(8, "ticket")))
    assert engine.allocator.pool.is_quarantined(page)
    engine.step()
    assert page not in loader.started[0][3]
    engine.abort(RequestId("b"))
    loader.end("aborted")
    assert run(engine) == {}
    assert engine.is_idle


def test_steps_run_ahead_with_a_loader_attached() -> None:
    engine, runner = ahead_engine()
    HeldLoader(engine)
    engine.add(engine_request("a", [1, 2, 3], max_tokens=9))
    assert run(engine) == {"a": expected_tokens([1, 2, 3], 9)}
    assert runner.read_before_begin == 1


def test_an_error_leaves_no_step_in_flight() -> None:
    engine, runner = ahead_engine()
    engine.add(engine_request("a", [1, 2, 3]))
    engine.step()
    runner.is_broken = True
    with pytest.raises(InvariantBroken, match="not a finite number"):
        engine.step()
    assert runner.unread == 0
    assert not engine._pipeline.is_ahead
    assert VOCAB > EOS
