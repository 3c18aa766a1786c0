"""The feed of cache changes: a subscriber holds exactly the worker's cache."""

import asyncio
from collections.abc import Iterator

import pytest
from harness.fakes.engines import a_request, an_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import InvalidRequest, Overloaded
from kvferry.core.ids import Incarnation
from kvferry.v1 import kv_events_pb2
from kvferry.workers.services import kv_events
from kvferry.workers.services.kv_events import CacheFeed


def names_of(joined: bytes) -> list[bytes]:
    assert len(joined) % 32 == 0
    return [joined[start : start + 32] for start in range(0, len(joined), 32)]


def blocks_of(blocks: kv_events_pb2.CachedBlocks) -> Iterator[tuple[bytes, tuple[bytes, int]]]:
    for name, parent, depth in zip(names_of(blocks.names), names_of(blocks.parents), blocks.depths, strict=True):
        yield name, (parent, depth)


class Follower:
    """A subscriber's copy of the cache, checked against every digest."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[bytes, int]] = {}
        self.sequence: int | None = None

    def hear(self, event: kv_events_pb2.KvEvent) -> None:
        assert event.incarnation == "i"
        if event.HasField("snapshot"):
            self.sequence = event.sequence
            self.blocks |= dict(blocks_of(event.snapshot.blocks))
            if not event.snapshot.last:
                return
        else:
            assert self.sequence is not None
            assert event.sequence == self.sequence + 1
            self.sequence = event.sequence
            for name in names_of(event.delta.removed):
                del self.blocks[name]
            self.blocks |= dict(blocks_of(event.delta.stored))
        xor = 0
        for name in self.blocks:
            xor ^= int.from_bytes(name, "big")
        assert (event.digest.count, event.digest.xor) == (len(self.blocks), xor.to_bytes(32, "big"))


PROMPTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(PROMPTS, st.integers(0, 30))
def test_a_follower_has_exactly_the_cache_whenever_it_joins(prompts: list[list[int]], joins_at: int) -> None:
    engine, _ = an_engine(num_blocks=12, max_model_tokens=32)  # small, so that blocks are evicted
    feed, follower = CacheFeed(Incarnation("i")), Follower()
    waiting = [a_request(str(i), prompt, max_tokens=3) for i, prompt in enumerate(prompts)]
    step = 0
    line = None
    subscription = feed.subscription()
    while waiting or engine.has_work:
        if step == joins_at:
            line = subscription.__enter__()
        if waiting:
            engine.add(waiting.pop())
        feed.apply(engine.step().cache_changes)
        step += 1
    if line is None:
        line = subscription.__enter__()
    while not line.empty():
        event = line.get_nowait()
        assert event is not None
        follower.hear(event)
    held = {name for name, _ in engine.allocator.index._content_of.values()}
    assert set(follower.blocks) == held
    for parent, depth in follower.blocks.values():
        assert (parent == bytes(32)) == (depth == 0)
    subscription.__exit__(None, None, None)


def test_a_large_cache_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_SNAPSHOT_PART", 2)
    engine, _ = an_engine()
    feed, follower = CacheFeed(Incarnation("i")), Follower()
    engine.add(a_request("a", list(range(20)), max_tokens=1))
    feed.apply(engine.step().cache_changes)
    with feed.subscription() as line:
        parts = [line.get_nowait() for _ in range(line.qsize())]
    assert [p.snapshot.last for p in parts if p is not None] == [False, False, True]
    for part in parts:
        assert part is not None
        follower.hear(part)
    assert len(follower.blocks) == 5


def test_a_subscriber_that_falls_behind_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_MAX_WAITING_EVENTS", 2)
    feed = CacheFeed(Incarnation("i"))
    with feed.subscription() as line:
        for _ in range(5):
            feed.apply([])
        events = [line.get_nowait() for _ in range(line.qsize())]
    assert events[-1] is None
    assert len(events) == 3


def test_subscribers_are_bounded_and_closing_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_SUBSCRIBERS", 1)
    feed = CacheFeed(Incarnation("i"))
    with feed.subscription() as line:
        with pytest.raises(Overloaded), feed.subscription():
            pass
        feed.close()
        line.get_nowait()
        assert line.get_nowait() is None
        with pytest.raises(asyncio.QueueEmpty):
            line.get_nowait()


def test_a_probe_is_of_one_moment_and_bounded() -> None:
    engine, _ = an_engine()
    feed = CacheFeed(Incarnation("i"))
    engine.add(a_request("a", list(range(20)), max_tokens=1))
    feed.apply(engine.step().cache_changes)
    held = sorted(name for name, _ in engine.allocator.index._content_of.values())
    answer = feed.probe([held[0], b"x" * 32, b""], 3)
    assert (answer.incarnation, answer.sequence, answer.digest.count) == ("i", 1, 5)
    assert list(answer.held) == [True, False, False]
    assert len(set(answer.samples)) == 3
    assert set(answer.samples) <= set(held)
    assert set(feed.probe([], 256).samples) == set(held)
    assert list(CacheFeed(Incarnation("j")).probe([], 5).samples) == []


async def test_a_probe_of_too_many_names_is_refused() -> None:
    service = kv_events.KvEventsService(CacheFeed(Incarnation("i")))
    names = [b"x" * 32] * (kv_events.MAX_PROBED_NAMES + 1)
    with pytest.raises(InvalidRequest, match="names has 257 items"):
        await service.Probe(kv_events_pb2.ProbeRequest(names=names), None)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="num_samples must be at most 256, not 1000"):
        await service.Probe(kv_events_pb2.ProbeRequest(num_samples=1000), None)  # type: ignore[arg-type]
