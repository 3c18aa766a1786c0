"""Pinned prefixes of an engine: computed by a request, not evicted while the pin lasts, evictable afterwards."""

from dataclasses import replace

import pytest
from harness.engines.pinner import Pinner, cached_tokens, flood
from harness.fakes.engines import a_request, a_windowed_engine, an_engine, run_until_idle, shares, small_limits
from harness.idle import assert_idle

from kvferry.core.clock import ManualClock
from kvferry.core.errors import GenerationFailed, InvalidRequest, InvariantBroken, KvferryError, Overloaded, Unavailable
from kvferry.core.ids import AdapterId, RequestId
from kvferry.engine.schedule.messages import PinnedPrefix

PREFIX = [7, *range(13)]
"""14 tokens: three full blocks of 4, and two tokens that are not pinned."""
LONGER = [*PREFIX, 1, 2, 3]


def test_a_pinned_prefix_is_computed_once_and_survives_a_flood_until_its_time_to_live_ends() -> None:
    clock = ManualClock()
    engine, runner = an_engine(clock=clock)
    pinner = Pinner(engine)
    pin = pinner.pin(PREFIX, ttl=100.0)
    assert (pin.num_tokens, pin.num_blocks, pin.seconds_left) == (12, 3, 100.0)
    assert shares(runner) == [[("pin0", 12)]]
    assert (engine.load().pins, engine.load().blocks_pinned) == (1, 3)
    engine.add(a_request("unpinned", [50, *range(13)], max_tokens=1))
    flood(engine)
    assert cached_tokens(engine, LONGER) == 12
    assert cached_tokens(engine, [50, *range(13)]) == 0, "the flood evicts what is not pinned"
    assert_idle(engine)
    assert engine.allocator.pool.num_free == 61
    clock.advance(99.9)
    flood(engine)
    assert cached_tokens(engine, LONGER) == 12
    clock.advance(0.2)
    flood(engine)
    assert (engine.load().pins, engine.load().blocks_pinned) == (0, 0)
    assert cached_tokens(engine, LONGER) == 0
    assert engine.allocator.pool.is_idle


def test_an_idle_engine_has_work_when_a_pin_expires() -> None:
    clock = ManualClock()
    engine, _ = an_engine(clock=clock)
    pinner = Pinner(engine)
    assert engine.pin_seconds_left is None
    pinner.pin(PREFIX, ttl=5.0)
    clock.advance(2.0)
    assert engine.pin_seconds_left == 3.0
    assert not engine.has_work
    clock.advance(3.0)
    assert engine.has_work
    run_until_idle(engine)
    assert engine.pin_seconds_left is None
    assert engine.allocator.pool.is_idle


def test_a_renewal_computes_nothing_and_extends_the_deadline() -> None:
    clock = ManualClock()
    engine, runner = an_engine(clock=clock)
    pinner = Pinner(engine)
    first = pinner.pin(PREFIX, ttl=10.0)
    clock.advance(8.0)
    again = pinner.pin([*PREFIX[:12], 40, 41, 42], ttl=10.0)
    assert (again.name, again.seconds_left) == (first.name, 10.0), "the same full blocks are the same pin"
    assert pinner.pin(PREFIX, ttl=1.0).seconds_left == 10.0
    assert len(runner.steps) == 1
    assert engine.load().blocks_pinned == 3


def test_a_cached_prefix_is_pinned_without_a_step() -> None:
    engine, runner = an_engine()
    engine.add(a_request("a", LONGER, max_tokens=1))
    run_until_idle(engine)
    assert Pinner(engine).pin(PREFIX).num_blocks == 3
    assert len(runner.steps) == 1
    flood(engine)
    assert cached_tokens(engine, LONGER) == 12


def test_an_unpinned_prefix_is_evictable() -> None:
    engine, _ = an_engine()
    pinner = Pinner(engine)
    pinner.pin(PREFIX)
    assert engine.pinning.unpin("", [50] * 12) is None
    assert engine.pinning.unpin("", [7]) is None
    assert engine.pinning.unpin("other", PREFIX) is None
    ended = engine.pinning.unpin("", PREFIX)
    assert ended is not None
    assert ended.num_blocks == 3
    assert engine.pinning.unpin("", PREFIX) is None
    assert cached_tokens(engine, LONGER) == 12, "its blocks stay cached"
    flood(engine)
    assert cached_tokens(engine, LONGER) == 0
    assert engine.allocator.pool.is_idle


def test_pins_of_two_tenants_are_separate() -> None:
    engine, _ = an_engine()
    pinner = Pinner(engine)
    assert pinner.pin(PREFIX, tenant="a").name != pinner.pin(PREFIX, tenant="b").name
    assert engine.load().blocks_pinned == 6
    flood(engine)
    assert cached_tokens(engine, LONGER, tenant="a") == 12
    assert cached_tokens(engine, LONGER) == 0


def test_pins_with_a_common_beginning_share_its_pages() -> None:
    engine, runner = an_engine()
    pinner = Pinner(engine)
    pinner.pin(PREFIX)
    pinner.pin([*PREFIX[:8], 30, 31, 32, 33])
    assert engine.load().blocks_pinned == 4
    assert shares(runner)[-1] == [("pin1", 4)]
    engine.pinning.unpin("", PREFIX)
    flood(engine)
    assert cached_tokens(engine, [*PREFIX[:8], 30, 31, 32, 33, 34]) == 12


def test_the_quota_is_a_share_of_the_pages() -> None:
    engine, _ = an_engine(pin_share=0.1)
    pinner = Pinner(engine)
    with pytest.raises(Overloaded, match="needs 7 more pages, but pins may use 6 pages and use 0"):
        pinner.pin(list(range(28)))
    pinner.pin(PREFIX)
    with pytest.raises(Overloaded, match="needs 4 more pages, but pins may use 6 pages and use 3"):
        pinner.pin(list(range(16)))
    pinner.pin([*PREFIX[:12], *range(12)])
    assert engine.load().blocks_pinned == 6
    engine.pinning.clear()
    pinner.pin(list(range(24)))
    assert engine.load().blocks_pinned == 6


def test_pages_for_the_longest_request_are_never_pinned() -> None:
    engine, _ = an_engine(pin_share=1.0, num_blocks=40, max_model_tokens=128)
    pinner = Pinner(engine)
    assert engine.pinning.pins.quota == 8
    pinner.pin(list(range(32)))
    engine.add(a_request("longest", [i % 90 + 1 for i in range(100)], max_tokens=28))
    tokens = run_until_idle(engine)
    assert len(tokens["longest"]) == 28
    full, _ = an_engine(pin_share=1.0, num_blocks=32, max_model_tokens=256)
    with pytest.raises(Overloaded, match="pins may use 0 pages"):
        Pinner(full).pin(PREFIX)


def test_prefixes_in_progress_reserve_pages_of_the_quota() -> None:
    engine, _ = an_engine(pin_share=0.1)
    pinner = Pinner(engine)
    prefix = [*PREFIX, 5, 6]
    first, same, other = pinner.send(prefix), pinner.send(prefix), pinner.send(list(range(40, 52)))
    assert isinstance(pinner.replies[other], Overloaded)
    run_until_idle(engine)
    assert isinstance(pinner.replies[first], PinnedPrefix)
    assert isinstance(pinner.replies[same], PinnedPrefix), "pages are reserved once for the same prefix"
    assert (engine.load().pins, engine.load().blocks_pinned) == (1, 4)


@pytest.mark.parametrize(
    ("tokens", "ttl", "field", "words"),
    [
        ([1, 2, 3], 1.0, "token_ids", "the prefix has 3 tokens; only full blocks of 4 tokens"),
        ([], 1.0, "prompt", "is empty"),
        ([1, 2, 3, 97], 1.0, "token_ids", "token ids must be from 0 to 96, not 1 to 97"),
        ([1] * 128, 1.0, "prompt", "context length"),
        (PREFIX, 0.0, "ttl_seconds", "above 0 and at most 604800, not 0.0"),
        (PREFIX, -1.0, "ttl_seconds", "not -1.0"),
        (PREFIX, 604801.0, "ttl_seconds", "not 604801.0"),
        (PREFIX, float("nan"), "ttl_seconds", "not nan"),
        (PREFIX, float("inf"), "ttl_seconds", "not inf"),
    ],
)
def test_an_invalid_pin_is_refused(tokens: list[int], ttl: float, field: str, words: str) -> None:
    engine, runner = an_engine()
    with pytest.raises(InvalidRequest, match=words) as caught:
        Pinner(engine).pin(tokens, ttl)
    assert caught.value.field == field
    assert not runner.steps


def test_a_share_of_zero_refuses_pins() -> None:
    engine, _ = an_engine(pin_share=0.0)
    with pytest.raises(InvalidRequest, match="start it with --pin-share above 0"):
        Pinner(engine).pin(PREFIX)


def test_a_reset_of_the_cache_ends_all_pins_and_outdates_their_pages() -> None:
    engine, _ = an_engine()
    pinner = Pinner(engine)
    pinner.pin(PREFIX)
    before = list(engine.allocator.pool.epochs)
    assert engine.reset_prefix_cache() == 3
    assert engine.allocator.pool.is_idle
    assert all(new > old for new, old in zip(engine.allocator.pool.epochs, before, strict=True))
    assert cached_tokens(engine, LONGER) == 0


def test_a_prefix_is_computed_again_if_the_cache_is_reset_meanwhile() -> None:
    engine, runner = an_engine(limits=small_limits(max_chunk_tokens=4))
    pinner = Pinner(engine)
    name = pinner.send(PREFIX)
    engine.step()
    engine.reset_prefix_cache()
    run_until_idle(engine)
    assert isinstance(pinner.replies[name], PinnedPrefix)
    assert len(runner.steps) == 6
    assert engine.load().blocks_pinned == 3


def test_a_pin_is_refused_after_three_attempts() -> None:
    engine, runner = an_engine(limits=small_limits(max_chunk_tokens=4))
    pinner = Pinner(engine)
    name = pinner.send(PREFIX)
    while engine.has_work:
        engine.step()
        engine.reset_prefix_cache()
        engine.check_integrity()
    assert isinstance(pinner.replies[name], Unavailable)
    assert len(runner.steps) == 9
    assert_idle(engine)


def test_the_pages_are_held_before_another_request_can_take_them() -> None:
    engine, _ = an_engine(num_blocks=20, max_model_tokens=60, limits=small_limits(token_budget=256))
    pinner = Pinner(engine)
    name = pinner.send(PREFIX)
    for number in range(6):
        engine.add(a_request(f"r{number}", [number + 20, *range(40)], max_tokens=8))
    run_until_idle(engine)
    assert isinstance(pinner.replies[name], PinnedPrefix)
    assert cached_tokens(engine, LONGER) == 12


def test_a_pin_whose_caller_has_gone_is_not_made_and_reserves_nothing() -> None:
    engine, _ = an_engine(pin_share=0.1)
    pinner = Pinner(engine)
    name = pinner.send(PREFIX)
    assert engine.abort(RequestId(name))
    run_until_idle(engine)
    assert pinner.replies == {}
    assert_idle(engine)
    assert engine.load().pins == 0
    assert pinner.pin(list(range(40, 64))).num_blocks == 6


def test_a_failure_that_removes_blocks_from_the_cache_ends_their_pins() -> None:
    engine, runner = an_engine()
    pinner = Pinner(engine)
    pinner.pin(PREFIX)
    pinner.pin([60] * 8)
    engine.add(a_request("fails", LONGER, max_tokens=4))
    compute = runner.run
    runner.run = lambda plan: replace(  # type: ignore[method-assign]
        compute(plan), failures={RequestId("fails"): GenerationFailed("not finite")}
    )
    (update,) = engine.step().updates
    assert isinstance(update.error, GenerationFailed)
    assert (engine.load().pins, engine.load().blocks_pinned) == (1, 2)
    assert_idle(engine)


def test_a_pin_whose_request_fails_gets_the_error() -> None:
    engine, runner = an_engine()
    pinner = Pinner(engine)
    name = pinner.send(PREFIX)
    compute = runner.run
    runner.run = lambda plan: replace(  # type: ignore[method-assign]
        compute(plan), failures={RequestId(name): GenerationFailed("not finite")}
    )
    engine.step()
    assert isinstance(pinner.replies[name], GenerationFailed)
    assert_idle(engine)


def test_a_prompt_that_exports_pinned_blocks_leaves_them_pinned() -> None:
    engine, _ = an_engine()
    Pinner(engine).pin(PREFIX)
    engine.add(a_request("exports", LONGER, exports=True))
    output = engine.step()
    (number,) = output.exports.values()
    engine.check_integrity()
    assert engine.load().exported_blocks == 5
    engine.release_export(number)
    assert engine.load().blocks_pinned == 3
    flood(engine)
    assert cached_tokens(engine, LONGER) == 12


def test_with_windows_the_pages_that_later_rows_read_are_pinned() -> None:
    engine, _ = a_windowed_engine((None, 6), num_blocks=96, max_model_tokens=96)
    prefix = [7, *range(39)]
    pin = Pinner(engine).pin(prefix)
    assert (pin.num_blocks, engine.load().blocks_pinned) == (10, 12)
    flood(engine)
    assert cached_tokens(engine, [*prefix, 1, 2]) == 40
    assert_idle(engine)


def test_pins_of_replaced_adapter_versions_end() -> None:
    engine, _ = an_engine()
    pinner = Pinner(engine)
    pinner.pin(PREFIX)
    pinner.pin([60] * 8)
    versions = [AdapterId("x", bytes(16)), AdapterId("x", b"1" * 16)]
    for pin, adapter in zip(engine.pinning.pins._pins.values(), versions, strict=True):
        pin.adapter = adapter
    engine.pinning.keep_version("y", None)
    assert engine.load().pins == 2
    engine.pinning.keep_version("x", versions[0])
    assert engine.load().blocks_pinned == 3
    engine.pinning.keep_version("x", None)
    assert engine.load().pins == 0
    assert_idle(engine)


def test_the_check_of_invariants_finds_a_pinned_page_without_a_name() -> None:
    engine, _ = an_engine()
    Pinner(engine).pin(PREFIX)
    engine.allocator.index.forget(engine.pinning.pins.held[0][1])
    with pytest.raises(InvariantBroken, match="are not in the prefix index"):
        engine.check_integrity()


def test_a_full_queue_refuses_a_pin() -> None:
    engine, _ = an_engine()
    engine._max_waiting = 1
    engine.add(a_request("a", [1]))
    pinner = Pinner(engine)
    refused: KvferryError | PinnedPrefix = pinner.replies[pinner.send(PREFIX)]
    assert isinstance(refused, Overloaded)
    assert "the queue is full" in refused.message
    run_until_idle(engine)
    assert pinner.pin(PREFIX).num_blocks == 3
