"""Scheduling policies by worked examples; tokens are equal under all of them."""

import random

import pytest
from harness.fakes.engines import VOCAB, a_request, an_engine, expected_tokens, run_until_idle, shares, small_limits
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.clock import ManualClock
from kvferry.core.errors import DeadlinePassed, UsageError
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.policies.policy import POLICIES, policy_of

BUDGET = 8192
LONG, SHORT = 100_000, 100


def with_priority(request: EngineRequest, priority: int) -> EngineRequest:
    return EngineRequest(request.request_id, request.token_ids, request.sampling, priority=priority)


@pytest.mark.parametrize(
    ("scheduling", "threshold", "short_at", "long_at"),
    [
        ("fcfs", BUDGET, 13, 13),
        ("fcfs", 4096, 1, 25),
        ("srtf", BUDGET, 1, 13),
        ("two-level", BUDGET, 1, 13),
        ("priority", BUDGET, 13, 13),
    ],
)
def test_a_short_prompt_behind_a_long_one(scheduling: str, threshold: int, short_at: int, long_at: int) -> None:
    # Kwon, "vLLM: an efficient inference engine for large language models", 2025, section 4.5: head-of-line blocking.
    limits = small_limits(
        token_budget=BUDGET, max_chunk_tokens=threshold, max_mixed_tokens=BUDGET, scheduling=scheduling
    )
    engine, _ = an_engine(num_blocks=7000, block_tokens=16, max_model_tokens=112_000, limits=limits)
    engine.add(a_request("long", [1] * LONG, max_tokens=2))
    engine.add(a_request("short", [2] * SHORT, max_tokens=20))
    first: dict[str, int] = {}
    for step in range(1, 40):
        for update in engine.step().updates:
            first.setdefault(update.request_id, step)
    assert first == {"short": short_at, "long": long_at}


def test_srtf_computes_a_newcomer_before_the_rest_of_a_running_prompt() -> None:
    limits = small_limits(token_budget=16, max_chunk_tokens=16, max_mixed_tokens=16, scheduling="srtf")
    engine, runner = an_engine(limits=limits)
    engine.add(a_request("long", list(range(60)), max_tokens=1))
    engine.step()
    engine.add(a_request("short", [3] * 5, max_tokens=1))
    engine.step()
    assert shares(runner) == [[("long", 16)], [("short", 5), ("long", 11)]]
    run_until_idle(engine)


def test_priority_admits_the_lowest_number_first_and_equals_by_arrival() -> None:
    engine, runner = an_engine(limits=small_limits(max_num_seqs=1, scheduling="priority"))
    for name, priority in (("a", 2), ("b", 0), ("c", 1), ("d", 0)):
        engine.add(with_priority(a_request(name, [1, 2], max_tokens=1), priority))
    run_until_idle(engine)
    assert [step[0][0] for step in shares(runner)] == ["b", "d", "c", "a"]


def test_a_higher_class_takes_the_place_of_a_lower_one_and_loses_no_token() -> None:
    engine, runner = an_engine(limits=small_limits(max_num_seqs=2, scheduling="priority"))
    for name, priority in (("low", 5), ("mid", 1)):
        engine.add(with_priority(a_request(name, [1, 2, 3], max_tokens=6), priority))
    engine.step()
    engine.add(with_priority(a_request("high", [7, 8], max_tokens=2), 0))
    tokens = run_until_idle(engine)
    names = [[name for name, _ in step] for step in shares(runner)[:3]]
    assert names == [["mid", "low"], ["mid", "high"], ["high", "mid"]]
    assert tokens["high"] == expected_tokens([7, 8], 2)
    assert engine.scheduler.num_preemptions == 1


def test_a_request_of_an_equal_class_preempts_none() -> None:
    engine, _ = an_engine(limits=small_limits(max_num_seqs=1, scheduling="priority"))
    engine.add(with_priority(a_request("a", [1], max_tokens=4), 1))
    engine.step()
    engine.add(with_priority(a_request("b", [2], max_tokens=4), 1))
    run_until_idle(engine)
    assert engine.scheduler.num_preemptions == 0


def test_two_levels_compare_classes_first() -> None:
    engine, runner = an_engine(limits=small_limits(max_num_seqs=1, scheduling="two-level"))
    engine.add(with_priority(a_request("short", [1], max_tokens=1), 1))
    engine.add(with_priority(a_request("long", [1] * 9, max_tokens=1), 0))
    run_until_idle(engine)
    assert [step[0][0] for step in shares(runner)] == ["long", "short"]


def test_classes_share_tokens_by_their_weights() -> None:
    limits = small_limits(max_num_seqs=1, scheduling="weighted", class_weights="0=3")
    engine, runner = an_engine(limits=limits)
    for number in range(12):
        for priority in (0, 7):
            engine.add(with_priority(a_request(f"{priority}-{number}", [number + 1, 2], max_tokens=1), priority))
    run_until_idle(engine)
    order = [step[0][0][0] for step in shares(runner)]
    assert order[:12].count("0") == 9
    assert order[:4].count("7") == 1  # neither class waits for the end of the other


def test_a_class_gains_no_credit_while_it_does_not_wait() -> None:
    engine, runner = an_engine(limits=small_limits(max_num_seqs=1, scheduling="weighted"))
    for number in range(10):
        engine.add(with_priority(a_request(f"a{number}", [number + 1], max_tokens=1), 0))
    for _ in range(5):
        engine.step()
    for number in range(6):
        engine.add(with_priority(a_request(f"b{number}", [number + 1, 3], max_tokens=1), 1))
    run_until_idle(engine)
    order = "".join(step[0][0][0] for step in shares(runner))
    assert order.startswith("aaaaa")
    assert "bbb" not in order[:10]


def test_weights_without_the_policy_are_refused() -> None:
    with pytest.raises(UsageError, match="scheduling=fcfs; use scheduling=weighted"):
        small_limits(class_weights="0=2")


def test_a_request_whose_deadline_cannot_be_met_is_refused_while_it_waits() -> None:
    clock = ManualClock()
    engine, _ = an_engine(limits=small_limits(max_num_seqs=1))
    engine._clock = clock
    engine.add(a_request("running", [1], max_tokens=50))
    late = a_request("late", [2] * 8, max_tokens=4)
    engine.add(EngineRequest(late.request_id, late.token_ids, late.sampling, deadline=clock.monotonic() + 5.0))
    engine.step()
    clock.advance(4.0)
    assert all(update.error is None for update in engine.step().updates)
    clock.advance(2.0)
    (refused,) = [update for update in engine.step().updates if update.error is not None]
    assert refused.request_id == "late"
    assert isinstance(refused.error, DeadlinePassed)
    assert len(run_until_idle(engine)["running"]) > 0
    assert engine.is_idle


def test_a_request_that_has_started_is_not_refused() -> None:
    clock = ManualClock()
    engine, _ = an_engine()
    engine._clock = clock
    request = a_request("r", [1, 2], max_tokens=4)
    engine.add(EngineRequest(request.request_id, request.token_ids, request.sampling, deadline=clock.monotonic() + 1.0))
    engine.step()
    clock.advance(100.0)
    run_until_idle(engine)
    assert engine.is_idle


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(UsageError, match="lifo"):
        policy_of("lifo")


@settings(deadline=None, max_examples=80)
@given(
    scheduling=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 1 << 20),
    num_blocks=st.integers(14, 40),
    budget=st.integers(3, 64),
    max_num_seqs=st.integers(1, 6),
)
def test_tokens_do_not_depend_on_the_policy(
    scheduling: str, seed: int, num_blocks: int, budget: int, max_num_seqs: int
) -> None:
    draw = random.Random(seed)
    limits = small_limits(token_budget=budget, max_num_seqs=max_num_seqs, scheduling=scheduling)
    engine, _ = an_engine(num_blocks=num_blocks, limits=limits)
    prompts: dict[str, list[int]] = {}
    tokens: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for number in range(12):
        name = f"r{number}"
        start = [draw.randrange(3)] * 8 if draw.random() < 0.5 else []  # prompts share prefixes
        prompts[name] = [*start, *(draw.randrange(VOCAB - 1) for _ in range(draw.randrange(1, 20)))]
        engine.add(with_priority(a_request(name, prompts[name], max_tokens=8), draw.randrange(3)))
        for _ in range(draw.randrange(3)):
            collect(engine, tokens)
        if draw.random() < 0.15:
            gone = draw.choice(sorted(prompts))
            engine.abort(a_request(gone, []).request_id)
            aborted.add(gone)
    for name, more in run_until_idle(engine).items():
        tokens.setdefault(name, []).extend(more)
    for name, prompt in prompts.items():
        if name not in aborted:
            assert tokens[name] == expected_tokens(prompt, 8)
    assert engine.is_idle
    assert engine.statistics.num_open == 0, "times of ended requests are deleted"
    assert len(prompts) - len(aborted) <= engine.statistics.num_finished <= len(prompts)


def collect(engine: Engine, tokens: dict[str, list[int]]) -> None:
    for update in engine.step().updates:
        tokens.setdefault(update.request_id, []).extend(t.token_id for t in update.tokens)
    engine.check_integrity()
