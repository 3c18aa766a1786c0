import random
from collections.abc import Sequence

import pytest

from kvferry.core.clock import ManualClock
from kvferry.core.errors import InvariantBroken
from kvferry.gateway.decide.cache_map import block_index, replica_map
from kvferry.gateway.decide.cache_map.audit import AuditAnswer, AuditOutcome
from kvferry.gateway.decide.cache_map.block_index import BlockIndex
from kvferry.gateway.decide.cache_map.cache_map import HISTORY_SECONDS, PENDING_SECONDS, Basis, CacheMap
from kvferry.gateway.decide.cache_map.feed_events import CacheDelta, Digest, NameSlice, SnapshotPart, xor_of
from kvferry.gateway.decide.cache_map.map_states import LOSSES, MAP_MACHINE, MapEvent, MapState
from kvferry.gateway.decide.cache_map.replica_map import FeedBroken

NAMES = [random.Random(number).randbytes(32) for number in range(100)]


def digest(names: Sequence[bytes]) -> Digest:
    return Digest(len(names), xor_of(b"".join(names)))


def part(incarnation: str, sequence: int, names: Sequence[bytes], is_last: bool, whole: Digest) -> SnapshotPart:
    return SnapshotPart(incarnation, sequence, b"".join(names), is_last, whole)


def delta(
    incarnation: str, sequence: int, removed: Sequence[bytes], stored: Sequence[bytes], whole: Digest
) -> CacheDelta:
    return CacheDelta(incarnation, sequence, b"".join(removed), b"".join(stored), whole)


def snapshot(names: Sequence[bytes], *, incarnation: str = "i", sequence: int = 0) -> SnapshotPart:
    return part(incarnation, sequence, names, True, digest(names))


def applied(cache_map: CacheMap, address: str, event: SnapshotPart | CacheDelta) -> None:
    for _ in cache_map.apply(address, event):
        pass


def with_snapshot(cache_map: CacheMap, address: str, names: Sequence[bytes]) -> None:
    cache_map.join(address)
    cache_map.subscribed(address)
    applied(cache_map, address, snapshot(names))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def cache_map(clock: ManualClock) -> CacheMap:
    return CacheMap(clock, max_blocks=100)


def confirmed(cache_map: CacheMap, names: Sequence[bytes], *addresses: str) -> list[int]:
    lookup = cache_map.look_up(names)
    return [lookup.of(address).num_confirmed for address in addresses]


def swept(cache_map: CacheMap) -> None:
    for _ in cache_map.sweep():
        pass


def test_every_loss_leads_to_blind_and_only_a_whole_snapshot_to_exact() -> None:
    for state in (MapState.CATCHING_UP, MapState.EXACT):
        assert {MAP_MACHINE.next(state, loss) for loss in LOSSES} == {MapState.BLIND}
    assert [s for (s, e), t in MAP_MACHINE.table.items() if t is MapState.EXACT and s is MapState.BLIND] == []
    assert {e for (_, e), t in MAP_MACHINE.table.items() if t is MapState.EXACT} == {MapEvent.APPLIED}
    with pytest.raises(InvariantBroken):
        MAP_MACHINE.next(MapState.GONE, MapEvent.SUBSCRIBED)


@pytest.mark.parametrize("number", [0, 1, 2, 3, 7, 64, 65])
def test_the_folded_xor_is_the_xor(number: int) -> None:
    expected = 0
    for name in NAMES[:number]:
        expected ^= int.from_bytes(name, "big")
    assert xor_of(b"".join(NAMES[:number])) == expected
    assert NameSlice.read(b"".join(NAMES[:number])).keys == [
        int.from_bytes(name[:8], "big") >> 4 for name in NAMES[:number]
    ]


def test_one_lookup_answers_for_all_replicas(cache_map: CacheMap) -> None:
    with_snapshot(cache_map, "a", NAMES[:5])
    with_snapshot(cache_map, "b", [*NAMES[:2], *NAMES[3:5]])  # the third block is missing
    with_snapshot(cache_map, "c", NAMES[1:5])  # the first block is missing
    cache_map.join("d")
    assert confirmed(cache_map, NAMES[:5], "a", "b", "c", "d", "unknown") == [5, 2, 0, 0, 0]
    assert confirmed(cache_map, NAMES[:9], "a", "b", "c") == [5, 2, 0]
    assert confirmed(cache_map, [], "a") == [0]


def test_a_block_stays_while_another_replica_has_it(cache_map: CacheMap) -> None:
    with_snapshot(cache_map, "a", NAMES[:3])
    with_snapshot(cache_map, "b", NAMES[:3])
    applied(cache_map, "a", delta("i", 1, NAMES[1:2], NAMES[5:6], digest([NAMES[0], NAMES[2], NAMES[5]])))
    assert confirmed(cache_map, NAMES[:3], "a", "b") == [1, 3]
    cache_map.leave("b")
    assert confirmed(cache_map, NAMES[:3], "a", "b") == [1, 0]
    swept(cache_map)
    assert cache_map.index.num_entries == 3


def test_blocks_are_present_while_they_are_pending_and_then_only_if_reported(
    cache_map: CacheMap, clock: ManualClock
) -> None:
    with_snapshot(cache_map, "a", NAMES[:2])
    with_snapshot(cache_map, "b", [])
    cache_map.look_up(NAMES[:6]).chose("a")
    found = cache_map.look_up(NAMES[:6]).of("a")
    assert (found.num_blocks, found.num_confirmed, found.basis) == (6, 2, Basis.PENDING)
    assert cache_map.look_up(NAMES[:6]).of("b").num_blocks == 0
    applied(cache_map, "a", delta("i", 1, (), NAMES[2:4], digest(NAMES[:4])))
    applied(cache_map, "a", delta("i", 2, NAMES[3:4], (), digest(NAMES[:3])))
    found = cache_map.look_up(NAMES[:6]).of("a")
    assert (found.num_blocks, found.num_confirmed) == (3, 3), "the fourth block was reported and later evicted"
    clock.advance(PENDING_SECONDS + 1)
    cache_map.look_up(NAMES[4:6]).chose("b")
    clock.advance(PENDING_SECONDS + 1)
    found = cache_map.look_up(NAMES[4:6]).of("b")
    assert (found.num_blocks, found.basis) == (0, Basis.EXACT), (
        "the worker did not report the dispatched blocks in time"
    )


def test_history_serves_a_blind_replica_for_a_time(cache_map: CacheMap, clock: ManualClock) -> None:
    with_snapshot(cache_map, "a", NAMES[:1])
    cache_map.look_up(NAMES[:4]).chose("a")
    applied(cache_map, "a", delta("i", 1, NAMES[:1], NAMES[1:4], digest(NAMES[1:4])))
    cache_map.lost("a", MapEvent.FEED_LOST, "cut")
    found = cache_map.look_up(NAMES[:4]).of("a")
    assert (found.num_blocks, found.state) == (0, MapState.BLIND), "the report of the eviction outlasts the map"
    cache_map.look_up(NAMES[:4]).chose("a")
    found = cache_map.look_up(NAMES[:6]).of("a")
    assert (found.num_blocks, found.num_confirmed, found.basis) == (4, 0, Basis.HISTORY)
    clock.advance(HISTORY_SECONDS + 1)
    assert cache_map.look_up(NAMES[:4]).of("a").num_blocks == 0
    cache_map.look_up(NAMES[:4]).chose("a")
    cache_map.met("a", "another incarnation")
    assert cache_map.look_up(NAMES[:4]).of("a").num_blocks == 0


def test_a_replica_that_is_catching_up_is_not_trusted(cache_map: CacheMap) -> None:
    cache_map.join("a")
    cache_map.subscribed("a")
    whole = digest(NAMES[:4])
    applied(cache_map, "a", part("i", 7, NAMES[:2], False, whole))
    assert cache_map.state("a") is MapState.CATCHING_UP
    assert confirmed(cache_map, NAMES[:2], "a") == [0]
    applied(cache_map, "a", part("i", 7, NAMES[2:4], True, whole))
    assert confirmed(cache_map, NAMES[:4], "a") == [4]


@pytest.mark.parametrize(
    ("event", "loss"),
    [
        (snapshot(NAMES[:3], incarnation="j"), MapEvent.OTHER_INCARNATION),
        (part("i", 8, NAMES[1:3], True, digest(NAMES[:3])), MapEvent.GAP),
        (part("i", 7, NAMES[1:9], True, digest(NAMES[:3])), MapEvent.MALFORMED),
        (part("i", 7, NAMES[1:2], True, digest(NAMES[:3])), MapEvent.MISMATCH),
        (part("i", 7, [b"short", NAMES[1]], True, digest(NAMES[:3])), MapEvent.MALFORMED),
        (part("i", 7, NAMES[1:3], True, Digest(3, -1)), MapEvent.MISMATCH),
        (part("i", 7, NAMES[1:3], True, Digest(1 << 63, 0)), MapEvent.FULL),
        (delta("i", 8, (), (), digest(NAMES[:1])), MapEvent.GAP),
    ],
)
def test_a_snapshot_must_be_consistent(cache_map: CacheMap, event: SnapshotPart | CacheDelta, loss: MapEvent) -> None:
    cache_map.join("a")
    cache_map.subscribed("a")
    applied(cache_map, "a", part("i", 7, NAMES[:1], False, digest(NAMES[:3])))
    with pytest.raises(FeedBroken) as broken:
        applied(cache_map, "a", event)
    assert broken.value.event is loss
    assert (cache_map.state("a"), cache_map.losses[loss]) == (MapState.BLIND, 1)
    with pytest.raises(FeedBroken):
        applied(cache_map, "a", snapshot([]))
    swept(cache_map)
    assert cache_map.index.num_entries == 0


def test_the_replica_with_most_blocks_is_dropped_when_the_map_is_full(cache_map: CacheMap) -> None:
    with_snapshot(cache_map, "large", NAMES[:70])
    with_snapshot(cache_map, "small", NAMES[:10])
    with_snapshot(cache_map, "other", NAMES[:15])
    applied(cache_map, "small", delta("i", 1, (), NAMES[10:20], digest(NAMES[:20])))
    assert [cache_map.state(a) for a in ("large", "small", "other")] == ["blind", "exact", "exact"]
    assert "most blocks" in cache_map.replicas["large"].why
    cache_map.subscribed("large")
    applied(cache_map, "large", part("i", 0, NAMES[:60], False, digest(NAMES[:70])))
    with pytest.raises(FeedBroken, match="most blocks"):
        applied(cache_map, "large", part("i", 0, NAMES[60:70], True, digest(NAMES[:70])))
    assert [cache_map.state(a) for a in ("small", "other")] == ["exact", "exact"]


def test_memory_of_dropped_maps_is_bounded(cache_map: CacheMap) -> None:
    cache_map.join("a")
    for _ in range(3):
        cache_map.subscribed("a")
        applied(cache_map, "a", snapshot(NAMES[:60]))
    cache_map.subscribed("a")
    with pytest.raises(FeedBroken, match="still being removed"):
        applied(cache_map, "a", snapshot(NAMES[:60]))
    assert cache_map.index.num_dead <= 200
    swept(cache_map)
    cache_map.subscribed("a")
    applied(cache_map, "a", snapshot(NAMES[:60]))
    assert confirmed(cache_map, NAMES[:60], "a") == [60]


def test_slots_are_bounded_and_used_again_after_a_sweep(cache_map: CacheMap, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_map.join("a")
    for _ in range(block_index.MAX_SLOTS):
        cache_map.subscribed("a")
        applied(cache_map, "a", snapshot([]))
    with pytest.raises(FeedBroken, match="full"):
        cache_map.subscribed("a")
    assert cache_map.state("a") is MapState.BLIND
    swept(cache_map)
    cache_map.subscribed("a")


def test_a_slot_freed_during_a_sweep_waits_for_the_next_sweep(cache_map: CacheMap) -> None:
    with_snapshot(cache_map, "a", NAMES[:40])
    with_snapshot(cache_map, "b", NAMES[:40])
    cache_map.leave("a")
    sweep = cache_map.sweep()
    next(sweep)
    cache_map.leave("b")
    with_snapshot(cache_map, "c", NAMES[20:60])
    for _ in sweep:
        pass
    assert confirmed(cache_map, NAMES[20:60], "c") == [40]
    assert cache_map.needs_sweep
    swept(cache_map)
    assert not cache_map.needs_sweep
    assert cache_map.index.num_entries == 40
    assert confirmed(cache_map, NAMES[20:60], "c") == [40]


def test_names_with_equal_leading_bits_are_counted_and_do_not_disturb_the_digest(cache_map: CacheMap) -> None:
    twin = NAMES[0][:8] + NAMES[1][8:]
    with_snapshot(cache_map, "a", [NAMES[0], twin])
    assert cache_map.index.num_collisions == 1
    applied(cache_map, "a", delta("i", 1, [twin], (), digest(NAMES[:1])))
    assert confirmed(cache_map, NAMES[:1], "a") == [1]
    applied(cache_map, "a", delta("i", 2, NAMES[:1], (), digest([])))
    assert confirmed(cache_map, NAMES[:1], "a") == [0]
    assert cache_map.index.num_entries == 0


def test_a_worker_that_repeats_its_names_is_malformed(cache_map: CacheMap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_map, "_MAX_REPEATED", 3)
    cache_map.join("a")
    cache_map.subscribed("a")
    with pytest.raises(FeedBroken, match=r"reported .* blocks as stored that were in the map"):
        applied(cache_map, "a", part("i", 0, [NAMES[0]] * 6, True, digest([NAMES[0]] * 6)))


def test_a_map_dropped_between_two_slices_stays_dropped(cache_map: CacheMap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_map, "SLICE_NAMES", 10)
    cache_map.join("a")
    cache_map.subscribed("a")
    steps = cache_map.apply("a", snapshot(NAMES[:40]))
    next(steps)
    cache_map.lost("a", MapEvent.FULL, "no room")
    cache_map.subscribed("a")
    with pytest.raises(FeedBroken):
        next(steps)
    assert cache_map.state("a") is MapState.CATCHING_UP, "the new subscription is not affected"
    applied(cache_map, "a", snapshot(NAMES[50:60]))
    swept(cache_map)
    assert cache_map.index.num_entries == 10


def an_answer(cache_map: CacheMap, names: Sequence[bytes], **changes: object) -> AuditAnswer:
    replica = cache_map.replicas["a"]
    fields = {
        "incarnation": "i",
        "sequence": replica.sequence,
        "digest": Digest(replica.count, replica.xor),
        "held": [True],
        "sample": names,
    }
    return AuditAnswer(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, AuditOutcome.MATCH),
        ({"held": [False]}, AuditOutcome.MISMATCH),
        ({"held": []}, AuditOutcome.MISMATCH),
        ({"sample": NAMES[50:51]}, AuditOutcome.MISMATCH),
        ({"sample": [b"short"]}, AuditOutcome.MISMATCH),
        ({"digest": Digest(4, 0)}, AuditOutcome.MISMATCH),
        ({"incarnation": "j"}, AuditOutcome.SKIPPED),
        ({"sequence": 1}, AuditOutcome.WAIT),
        ({"sequence": (1 << 64) - 1}, AuditOutcome.WAIT),
    ],
)
def test_an_audit_compares_both_directions(
    cache_map: CacheMap, changes: dict[str, object], outcome: AuditOutcome
) -> None:
    with_snapshot(cache_map, "a", NAMES[:4])
    cache_map.look_up(NAMES[:4]).chose("a")
    audit = cache_map.begin_audit("a")
    assert audit is not None
    assert audit.names == (NAMES[3],)
    assert cache_map.end_audit("a", audit, an_answer(cache_map, NAMES[:4], **changes)) is outcome
    assert cache_map.state("a") is (MapState.BLIND if outcome is AuditOutcome.MISMATCH else MapState.EXACT)


def test_an_audit_ignores_concurrent_changes(cache_map: CacheMap) -> None:
    with_snapshot(cache_map, "a", NAMES[:4])
    cache_map.look_up(NAMES[:4]).chose("a")
    audit = cache_map.begin_audit("a")
    assert audit is not None
    answer = an_answer(cache_map, NAMES[:4])  # taken before the next change
    applied(cache_map, "a", delta("i", 1, NAMES[2:4], NAMES[6:7], digest([*NAMES[:2], NAMES[6]])))
    assert cache_map.end_audit("a", audit, answer) is AuditOutcome.MATCH
    assert cache_map.begin_audit("unknown") is None
    cache_map.leave("a")
    assert cache_map.end_audit("a", audit, answer) is AuditOutcome.SKIPPED


def test_sets_of_many_replicas_are_found(clock: ManualClock) -> None:
    cache_map = CacheMap(clock, max_blocks=10_000)
    for number in range(70):  # more replicas than a machine word has bits
        with_snapshot(cache_map, f"w{number}", NAMES[: 1 + number])
    lookup = cache_map.look_up(NAMES)
    assert [lookup.of(f"w{number}").num_confirmed for number in range(70)] == list(range(1, 71))


def test_an_unknown_removal_is_reported_by_the_index() -> None:
    index = BlockIndex()
    bit = index.take_slot()
    assert bit is not None
    assert index.add([1, 2], bit) == 0
    assert index.remove([2, 3], bit) == 1
