"""Sequences of the lowest priority pause while others are computed, and never starve."""

import pytest
from harness.fakes.engines import ArithmeticRunner, a_request, an_engine, expected_tokens, run_until_idle, small_limits
from harness.fakes.loaders import HeldLoader
from unit.engine.schedule.plan.test_pipeline import ahead_engine

from kvferry.core.ids import RequestId
from kvferry.core.sampling import MAX_PRIORITY, SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.policies.background import FIRST_TOKENS, GROWTH_STEPS, TURN_TOKENS
from kvferry.engine.schedule.step.kv_progress import RemoteKv

PAUSING = ["fcfs", "priority", "srtf", "two-level"]
BATCH = [1, 2, 3]
CLIENT = [7, 8]


def names(runner: ArithmeticRunner) -> list[set[str]]:
    return [{str(item.request_id) for item in plan.scheduled} for plan in runner.steps]


@pytest.mark.parametrize("scheduling", PAUSING)
def test_a_background_sequence_pauses_beside_others_and_continues_after_them(scheduling: str) -> None:
    engine, runner = an_engine(limits=small_limits(scheduling=scheduling))
    engine.add(a_request("batch", BATCH, max_tokens=20, priority=MAX_PRIORITY))
    engine.step()
    engine.step()
    engine.add(a_request("client", CLIENT, max_tokens=9))
    tokens = run_until_idle(engine)
    assert tokens["client"] == expected_tokens(CLIENT, 9)
    assert names(runner) == [{"batch"}] * 2 + [{"client"}] * 9 + [{"batch"}] * 18
    assert engine.is_idle


@pytest.mark.parametrize("scheduling", PAUSING)
def test_beside_others_it_takes_part_in_one_of_many_steps(scheduling: str) -> None:
    engine, runner = an_engine(limits=small_limits(scheduling=scheduling, background_steps=32))
    engine.add(a_request("client", CLIENT, max_tokens=100))
    engine.add(a_request("batch", BATCH, max_tokens=3, priority=MAX_PRIORITY))
    tokens = run_until_idle(engine)
    assert tokens == {"client": expected_tokens(CLIENT, 100), "batch": expected_tokens(BATCH, 3)}
    together = [step for step, found in enumerate(names(runner), start=1) if "batch" in found]
    assert together == [32, 64, 96]


def test_steps_beside_a_paused_sequence_are_planned_ahead() -> None:
    engine, runner = ahead_engine(limits=small_limits(background_steps=32))
    engine.add(EngineRequest(RequestId("batch"), BATCH, greedy(20), priority=MAX_PRIORITY))
    engine.step()
    engine.step()
    engine.add(EngineRequest(RequestId("client"), CLIENT, greedy(80)))
    run_until_idle(engine)
    alone = [len(found) == 1 for found in names(runner)]
    num_changes = runner.read_before_begin - names(runner).count({"batch"})
    assert num_changes <= 8, "each change of the sequences reads the result before the next step begins"
    assert alone.count(False) == 2
    assert engine.is_idle


def test_the_first_steps_of_background_sequences_alone_are_not_planned_ahead() -> None:
    """A request that arrives would wait for the step ahead too."""
    engine, runner = ahead_engine(limits=small_limits())
    engine.add(EngineRequest(RequestId("batch"), BATCH, greedy(100), priority=MAX_PRIORITY))
    run_until_idle(engine)
    assert GROWTH_STEPS - 1 <= runner.read_before_begin <= GROWTH_STEPS + 3
    assert len(runner.steps) == 100
    assert engine.is_idle


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


@pytest.mark.parametrize(
    "limits",
    [small_limits(scheduling="weighted", class_weights="0=3,1000=1"), small_limits(background_steps=1)],
    ids=["weighted", "never pauses"],
)
def test_by_setting_it_is_computed_like_others(limits: SchedulerLimits) -> None:
    engine, runner = an_engine(limits=limits)
    engine.add(a_request("batch", BATCH, max_tokens=6, priority=MAX_PRIORITY))
    engine.add(a_request("client", CLIENT, max_tokens=6))
    run_until_idle(engine)
    assert names(runner) == [{"batch", "client"}] * 6


@pytest.mark.parametrize("scheduling", PAUSING)
@pytest.mark.parametrize("limits", [{"max_num_seqs": 1}, {"max_num_seqs": 8}])
def test_it_gives_way_to_a_sequence_that_lacks_a_place_or_pages(scheduling: str, limits: dict[str, int]) -> None:
    engine, runner = an_engine(num_blocks=8, limits=small_limits(scheduling=scheduling, **limits))
    engine.add(a_request("batch", list(range(16)), max_tokens=8, priority=MAX_PRIORITY))
    engine.step()
    engine.add(a_request("client", list(range(30, 48)), max_tokens=4))
    tokens = run_until_idle(engine)
    assert engine.scheduler.num_preemptions == 1
    assert tokens["client"] == expected_tokens(list(range(30, 48)), 4)
    assert tokens["batch"] == expected_tokens(list(range(16)), 8)[1:], "one was written before"
    assert names(runner)[1:5] == [{"client"}] * 4
    assert engine.is_idle


@pytest.mark.parametrize("scheduling", PAUSING)
def test_a_later_sequence_is_admitted_before_those_of_the_background(scheduling: str) -> None:
    engine, runner = an_engine(limits=small_limits(scheduling=scheduling, max_num_seqs=1))
    for number in range(3):
        engine.add(a_request(f"batch {number}", [number, 1], max_tokens=2, priority=MAX_PRIORITY))
    engine.add(a_request("client", CLIENT, max_tokens=2))
    run_until_idle(engine)
    assert names(runner)[:2] == [{"client"}] * 2


def test_a_batch_of_the_background_holds_up_no_later_sequence() -> None:
    engine, runner = an_engine(limits=small_limits(scheduling="two-level", max_num_seqs=1))
    for number in range(12):
        engine.add(a_request(f"batch {number}", [number, 1], max_tokens=3, priority=MAX_PRIORITY))
    engine.step()
    engine.add(a_request("client", CLIENT, max_tokens=3))
    run_until_idle(engine)
    assert names(runner)[1:4] == [{"client"}] * 3


@pytest.mark.parametrize("scheduling", PAUSING)
@pytest.mark.parametrize("is_running", [True, False])
def test_log_probabilities_of_its_prompt_hold_up_no_others(scheduling: str, is_running: bool) -> None:
    engine, runner = an_engine(num_blocks=400, max_model_tokens=1024, limits=small_limits(scheduling=scheduling))
    batch = a_request("batch", list(range(90)), max_tokens=4, priority=MAX_PRIORITY, prompt_logprobs=1)
    if is_running:
        engine.add(batch)
        engine.step()
    engine.add(a_request("stream", [7, 8], max_tokens=300))
    engine.step()
    if not is_running:
        engine.add(batch)
    engine.add(a_request("client", CLIENT, max_tokens=4, prompt_logprobs=1))
    before = len(runner.steps)
    run_until_idle(engine)
    assert "client" in names(runner)[before]
    assert engine.is_idle


def test_others_do_not_wait_for_a_block_of_a_paused_sequence() -> None:
    engine, runner = an_engine(limits=small_limits(max_chunk_tokens=4))
    prefix = list(range(12))
    engine.add(a_request("batch", [*prefix, 1], max_tokens=2, priority=MAX_PRIORITY))
    engine.step()  # the first block of three
    engine.add(a_request("client", [*prefix, 2], max_tokens=2))
    tokens = run_until_idle(engine)
    assert tokens["client"] == expected_tokens([*prefix, 2], 2)
    assert all("batch" not in found for found in names(runner)[1:5])


def test_it_continues_while_the_kv_of_another_sequence_is_loaded() -> None:
    engine, runner = an_engine()
    loader = HeldLoader(engine)
    engine.add(a_request("batch", BATCH, max_tokens=8, priority=MAX_PRIORITY))
    engine.step()
    remote = RemoteKv(source="elsewhere", first_token=0, num_tokens=8)
    engine.add(a_request("client", list(range(9)), max_tokens=1, remote=remote))
    for _ in range(4):
        engine.step()
    assert names(runner) == [{"batch"}] * 5
    loader.end("lost")
    run_until_idle(engine)
    assert engine.is_idle


def test_steps_of_the_background_alone_are_short_at_first_and_grow() -> None:
    engine, runner = an_engine(num_blocks=512, max_model_tokens=1024, limits=small_limits(token_budget=512))
    prompt = [number % 90 for number in range(1000)]
    engine.add(a_request("batch", prompt, max_tokens=60, priority=MAX_PRIORITY))
    tokens = run_until_idle(engine)
    assert tokens == {"batch": expected_tokens(prompt, len(tokens["batch"]))}
    counts = [plan.scheduled[0].num_scheduled for plan in runner.steps]
    assert counts[: GROWTH_STEPS - 1] == [FIRST_TOKENS] * (GROWTH_STEPS - 1)
    assert counts[GROWTH_STEPS] == 2 * FIRST_TOKENS
    engine.add(a_request("client", CLIENT, max_tokens=1))
    run_until_idle(engine)
    engine.add(a_request("next", prompt[::-1], max_tokens=1, priority=MAX_PRIORITY))
    engine.step()
    assert runner.steps[-1].scheduled[0].num_scheduled == FIRST_TOKENS


def test_beside_others_few_tokens_of_the_background_are_computed() -> None:
    engine, runner = an_engine(limits=small_limits(background_steps=4, max_num_seqs=32), num_blocks=256)
    for number in range(20):
        engine.add(a_request(f"batch {number}", [number, 1], max_tokens=9, priority=MAX_PRIORITY))
    engine.step()
    engine.add(a_request("client", CLIENT, max_tokens=40))
    run_until_idle(engine)
    beside = [plan for plan in runner.steps if "client" in {str(item.request_id) for item in plan.scheduled}]
    counts = [sum(item.num_scheduled for item in plan.scheduled if item.request_id != "client") for plan in beside]
    assert counts == [0, 0, 0, TURN_TOKENS] * 10
