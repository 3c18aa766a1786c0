"""Prompts whose requests asked for retention: kept until their time to live ends, within each tenant's share."""

from collections.abc import Sequence

import pytest
from harness.engines.pinner import Pinner, cached_tokens, flood
from harness.fakes.engines import a_request, a_windowed_engine, an_engine, run_until_idle
from harness.idle import assert_idle
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.clock import ManualClock
from kvferry.core.hashing import cache_scope
from kvferry.core.ids import AdapterId, RequestId
from kvferry.core.retention import MAX_RETENTION_SECONDS, Retention, RetentionOutcome
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.pins.pins import MAX_PINS

PROMPT = [7, *range(13)]
"""14 tokens: three full blocks of 4."""
LONGER = [*PROMPT, 1, 2, 3]


def retain(engine: Engine, tokens: Sequence[int], seconds: float = 60.0, *, tenant: str = "") -> Retention:
    """Run a request with retention; return what was granted."""
    engine.add(a_request("asks", list(tokens), max_tokens=2, scope=tenant, retain_seconds=seconds))
    results: list[Retention] = []
    while engine.has_work:
        results += engine.step().retained.values()
        engine.check_integrity()
    (result,) = results
    return result


def test_a_retained_prompt_survives_a_flood_until_its_time_to_live_ends() -> None:
    clock = ManualClock()
    engine, runner = an_engine(clock=clock)
    assert retain(engine, PROMPT, 100.0) == Retention(RetentionOutcome.RETAINED, 12, 100.0)
    num_steps = len(runner.steps)
    flood(engine)
    assert cached_tokens(engine, LONGER) == 12
    assert (engine.load().pins, engine.load().blocks_pinned) == (0, 3), "pins are the operator's"
    assert num_steps == 2, "a retention computes nothing"
    assert_idle(engine)
    assert engine.pin_seconds_left == 100.0
    clock.advance(100.0)
    assert engine.has_work
    flood(engine)
    assert cached_tokens(engine, LONGER) == 0
    assert len(engine.retaining) == engine.load().blocks_pinned == 0
    assert engine.allocator.pool.is_idle


def test_a_request_without_retention_keeps_nothing() -> None:
    engine, _ = an_engine()
    engine.add(a_request("plain", PROMPT, max_tokens=2))
    run_until_idle(engine)
    assert len(engine.retaining) == 0
    flood(engine)
    assert cached_tokens(engine, LONGER) == 0


def test_the_next_turn_replaces_the_retention_of_its_beginning_and_keeps_its_promise() -> None:
    clock = ManualClock()
    engine, _ = an_engine(clock=clock)
    retain(engine, PROMPT, 100.0)
    clock.advance(10.0)
    assert retain(engine, [*PROMPT, *range(20, 26)], 30.0) == Retention(RetentionOutcome.RETAINED, 20, 90.0)
    assert len(engine.retaining) == 1
    assert engine.retaining.num_pages == 5
    assert retain(engine, PROMPT, 5.0).outcome is RetentionOutcome.RETAINED
    assert engine.retaining.num_pages == 5, "the beginning shares the pages"


def test_the_same_prompt_extends_its_retention_and_never_shortens_it() -> None:
    clock = ManualClock()
    engine, _ = an_engine(clock=clock)
    retain(engine, PROMPT, 50.0)
    clock.advance(10.0)
    assert retain(engine, PROMPT, 10.0).seconds == 40.0
    assert retain(engine, PROMPT, 80.0).seconds == 80.0
    assert len(engine.retaining) == 1


def test_one_tenant_holds_half_of_the_quota_and_two_hold_all_of_it() -> None:
    engine, _ = an_engine(num_blocks=64, retention_share=0.25)
    assert engine.retaining.quota == 16
    assert retain(engine, range(32), tenant="a").outcome is RetentionOutcome.RETAINED
    assert retain(engine, [9, *range(7)], tenant="a") == Retention(RetentionOutcome.QUOTA)
    assert retain(engine, range(32), tenant="b").outcome is RetentionOutcome.RETAINED
    assert retain(engine, [9, *range(7)], tenant="c") == Retention(RetentionOutcome.QUOTA)
    flood(engine)
    assert cached_tokens(engine, [*range(32), 1], tenant="a") == 32
    assert_idle(engine)


def test_salts_and_adapters_of_a_tenant_share_its_part() -> None:
    engine, _ = an_engine(num_blocks=64, retention_share=0.25)
    assert retain(engine, range(20), tenant=cache_scope("a", "one")).outcome is RetentionOutcome.RETAINED
    assert retain(engine, range(20), tenant=cache_scope("a", "two")).outcome is RetentionOutcome.QUOTA


def test_retentions_leave_the_quota_of_pins_alone() -> None:
    engine, _ = an_engine(num_blocks=64, pin_share=0.1, retention_share=0.25)
    retain(engine, range(32), tenant="a")
    assert Pinner(engine).pin(PROMPT).num_blocks == 3
    assert engine.load().blocks_pinned == 11


def test_retentions_get_what_the_longest_request_and_the_quota_of_pins_leave() -> None:
    engine, _ = an_engine(num_blocks=48, max_model_tokens=128, pin_share=0.25, retention_share=0.25)
    assert (engine.pinning.pins.quota, engine.retaining.quota) == (12, 4)
    assert retain(engine, range(8)).outcome is RetentionOutcome.RETAINED
    assert retain(engine, [60, *range(7)]) == Retention(RetentionOutcome.QUOTA)
    assert Pinner(engine).pin([50, *range(47)]).num_blocks == 12
    flood(engine)
    assert_idle(engine)
    full, _ = an_engine(num_blocks=40, max_model_tokens=128, pin_share=1.0, retention_share=1.0)
    assert retain(full, PROMPT) == Retention(RetentionOutcome.QUOTA)


@pytest.mark.parametrize("windows", [(None,), (None, 8), (8,), (8, 16)])
def test_the_promise_to_a_shorter_prompt_is_kept_beside_a_longer_one(windows: tuple[int | None, ...]) -> None:
    engine, _ = a_windowed_engine(windows, num_blocks=200)
    short = [3, *range(27)]
    granted = retain(engine, short)
    assert granted.outcome is RetentionOutcome.RETAINED
    assert retain(engine, [*short, *range(40, 64)]).outcome is RetentionOutcome.RETAINED
    flood(engine)
    assert cached_tokens(engine, [*short, 1]) >= granted.num_tokens
    assert_idle(engine)


def test_nested_and_branching_retentions_have_a_bound_of_references() -> None:
    engine, _ = an_engine(num_blocks=400, max_model_tokens=400, pin_share=0.1, retention_share=0.5)
    quota = engine.retaining.quota // 2
    prompt = [(n * n + n // 97) % 97 for n in range(4 * 90)]
    engine.add(a_request("computed", prompt, max_tokens=1))
    run_until_idle(engine)
    outcomes = [retain(engine, prompt[: 4 * length]).outcome for length in range(90, 0, -1)]
    assert RetentionOutcome.QUOTA in outcomes
    (pins,) = engine.retaining._tenants.values()
    assert sum(len(pages) for pages in engine.retaining.held) == pins.num_references <= 8 * quota


def test_one_tenant_has_at_most_half_of_the_number_of_retentions() -> None:
    engine, _ = an_engine(num_blocks=3000, max_model_tokens=64, pin_share=0.1, retention_share=0.9)
    outcomes = [retain(engine, [n % 60, n // 60, 1, 2], tenant="a").outcome for n in range(MAX_PINS // 2 + 1)]
    assert outcomes[:-1] == [RetentionOutcome.RETAINED] * (MAX_PINS // 2)
    assert outcomes[-1] is RetentionOutcome.QUOTA
    assert retain(engine, [1, 1, 1, 2], tenant="b").outcome is RetentionOutcome.RETAINED


@pytest.mark.parametrize(
    ("share", "tokens", "outcome"),
    [(0.0, PROMPT, RetentionOutcome.OFF), (0.25, [1, 2, 3], RetentionOutcome.SHORT)],
)
def test_what_cannot_be_kept_is_said_and_the_request_is_answered(
    share: float, tokens: list[int], outcome: RetentionOutcome
) -> None:
    engine, _ = an_engine(retention_share=share)
    assert retain(engine, tokens) == Retention(outcome)
    assert_idle(engine)


def test_the_longest_time_to_live_is_a_day() -> None:
    engine, _ = an_engine(clock=ManualClock())
    assert retain(engine, PROMPT, 1e9).seconds == MAX_RETENTION_SECONDS


def test_an_aborted_request_retains_nothing() -> None:
    engine, _ = an_engine()
    engine.add(a_request("asks", PROMPT, retain_seconds=60.0))
    engine.abort(RequestId("asks"))
    engine.add(a_request("asks", LONGER, max_tokens=1))
    run_until_idle(engine)
    assert len(engine.retaining) == 0
    assert_idle(engine)


def test_a_reset_of_the_cache_ends_retentions() -> None:
    engine, _ = an_engine()
    retain(engine, PROMPT)
    engine.reset_prefix_cache()
    assert len(engine.retaining) == 0
    assert engine.allocator.pool.is_idle


def test_a_draining_worker_ends_its_retentions_and_grants_none() -> None:
    engine, _ = an_engine()
    retain(engine, PROMPT)
    engine.close_pins()
    assert engine.allocator.pool.is_idle
    assert retain(engine, PROMPT) == Retention(RetentionOutcome.DRAINING)


def test_retentions_of_another_version_of_an_adapter_end() -> None:
    engine, _ = an_engine()
    retain(engine, PROMPT)
    (pins,) = engine.retaining._tenants.values()
    (pin,) = pins._pins.values()
    pin.adapter = AdapterId("style", b"1" * 32)
    engine.retaining.keep_version("style", pin.adapter)
    assert len(engine.retaining) == 1
    engine.retaining.keep_version("style", AdapterId("style", b"2" * 32))
    assert len(engine.retaining) == 0


PROMPTS = [[7, *range(11)], [7, *range(11), 50, 51, 52, 53], [8, *range(19)], [9, *range(30)], [7, *range(23)], [5] * 4]
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("retain"), st.integers(0, 5), st.sampled_from(["", "a", "b"])),
        st.tuples(st.just("pin"), st.integers(0, 5), st.sampled_from(["", "a"])),
        st.tuples(st.just("abort"), st.integers(0, 30), st.just("")),
        st.tuples(st.just("wait"), st.integers(0, 20), st.just("")),
        st.tuples(st.just("steps"), st.integers(1, 5), st.just("")),
        st.tuples(st.just("reset"), st.just(0), st.just("")),
    ),
    max_size=50,
)


@settings(deadline=None, max_examples=60)
@given(operations=OPERATIONS)
def test_every_granted_retention_lasts_until_its_time(operations: list[tuple[str, int, str]]) -> None:
    clock = ManualClock()
    engine, _ = an_engine(num_blocks=40, max_model_tokens=64, clock=clock, pin_share=0.3, retention_share=0.5)
    pinner = Pinner(engine)
    asked: dict[str, tuple[list[int], str]] = {}
    granted: list[tuple[list[int], str, float]] = []

    def step() -> None:
        for name, result in engine.step().retained.items():
            if result.outcome is RetentionOutcome.RETAINED:
                tokens, tenant = asked[name]
                granted.append((tokens[: result.num_tokens], tenant, clock.monotonic() + result.seconds))
        engine.check_integrity()

    for number, (kind, value, tenant) in enumerate(operations):
        if kind == "retain":
            asked[f"r{number}"] = PROMPTS[value], tenant
            seconds = 3.0 + number
            engine.add(a_request(f"r{number}", PROMPTS[value], max_tokens=3, scope=tenant, retain_seconds=seconds))
        elif kind == "pin":
            pinner.send(PROMPTS[value], 5.0, tenant=tenant)
        elif kind == "abort":
            engine.abort(RequestId(f"r{value}"))
        elif kind == "wait":
            clock.advance(float(value))
        elif kind == "reset":
            engine.reset_prefix_cache()
            granted.clear()
        for _ in range(value if kind == "steps" else 0):
            step()
    while engine.has_work:
        step()
    flood(engine)
    for tokens, tenant, deadline in granted:
        if deadline > clock.monotonic():
            assert cached_tokens(engine, [*tokens, 1], tenant=tenant) == len(tokens)
    assert_idle(engine)
    clock.advance(1000.0)
    run_until_idle(engine)
    assert engine.allocator.pool.is_idle
