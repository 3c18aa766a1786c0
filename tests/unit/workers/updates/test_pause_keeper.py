"""The pause of a worker: the newest state wins, waits have limits, and every field has a range."""

import math
from collections.abc import AsyncIterator

import pytest
from harness.fakes.engines import a_request, an_engine
from harness.idle import assert_idle

from kvferry.core.clock import SystemClock
from kvferry.core.errors import InvalidRequest
from kvferry.core.ids import new_incarnation
from kvferry.core.pausing import PauseMode, WeightVersion
from kvferry.core.sampling import FinishReason
from kvferry.engine.loop.engine_loop import CommandQueue, EngineLoop
from kvferry.engine.loop.engine_stream import StreamItem
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate
from kvferry.kv.handoff.offers import OfferTimes
from kvferry.kv.interface.ticket import Keyring
from kvferry.kv.pages.layout import KvLayout
from kvferry.kv.registry import open_transport
from kvferry.v1 import common_pb2
from kvferry.v1 import worker_admin_pb2 as pb
from kvferry.workers.calls.context import UnitIdentity, WorkerContext
from kvferry.workers.handoff.kv_report import KvReportBuilder
from kvferry.workers.handoff.offer_desk import OfferDesk
from kvferry.workers.services.decode import _Handoff, _messages
from kvferry.workers.updates.pause_keeper import PauseKeeper

LAYOUT = KvLayout("digest", "float32", num_layers=2, num_kv_heads=1, head_dim=4, block_tokens=4)


@pytest.fixture
async def keeper() -> AsyncIterator[PauseKeeper]:
    engine, _ = an_engine()
    loop = EngineLoop(engine, CommandQueue(), name="engine under test", on_failure=lambda _: None)
    loop.start()
    context = WorkerContext(
        UnitIdentity(new_incarnation()), "both", "m", LAYOUT, "memory", "", 128, loop, SystemClock()
    )
    desk = OfferDesk(context, Keyring([b"k" * 16]), OfferTimes(), open_transport("memory", new_incarnation()))
    yield PauseKeeper(context, desk)
    await loop.stop()
    assert_idle(engine)


async def test_the_newest_state_wins_and_a_caller_without_a_revision_makes_the_next(keeper: PauseKeeper) -> None:
    kept = await keeper.set(pb.SetPauseRequest(revision=5, mode=pb.PAUSE_MODE_KEEP, by="ann", timeout_seconds=30))
    assert (kept.revision, kept.mode, kept.by, kept.settled) == (5, pb.PAUSE_MODE_KEEP, "ann", True)
    late = await keeper.set(pb.SetPauseRequest(revision=4, by="late"))
    assert (late.revision, late.mode) == (5, pb.PAUSE_MODE_KEEP)
    again = await keeper.set(pb.SetPauseRequest(revision=5, mode=pb.PAUSE_MODE_KEEP, by="ann"))
    assert again == kept
    resumed = await keeper.set(pb.SetPauseRequest())
    assert resumed.revision > 5
    assert (resumed.mode, resumed.settled) == (pb.PAUSE_MODE_UNSPECIFIED, False)


async def test_a_wait_has_a_limit_and_ends_when_the_request_does(keeper: PauseKeeper) -> None:
    loop = keeper._context.loop
    await loop.pause_generation(PauseMode.KEEP)
    with loop.submit(a_request("a", [1, 2, 3], max_tokens=4)) as stream:
        await loop.pause_generation(None)
        async for _ in stream:
            pass
    status = await keeper.set(pb.SetPauseRequest(mode=pb.PAUSE_MODE_WAIT, timeout_seconds=30))
    assert status.settled


async def test_generation_is_stopped_for_a_change_and_runs_afterwards(keeper: PauseKeeper) -> None:
    loop = keeper._context.loop
    async with keeper.stopped():
        assert await keeper.settled(30.0, is_stopped=True)
        assert loop._engine.pausing.mode is PauseMode.KEEP
    assert loop._engine.pausing.mode is None
    await keeper.set(pb.SetPauseRequest(mode=pb.PAUSE_MODE_ABORT))
    async with keeper.stopped():
        pass
    assert loop._engine.pausing.mode is PauseMode.ABORT


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.SetPauseRequest(by="x" * 129), "by"),
        (pb.SetPauseRequest(by="a\nb"), "by"),
        (pb.SetPauseRequest(revision=1 << 63), "revision"),
        (pb.SetPauseRequest(since=math.nan), "since"),
        (pb.SetPauseRequest(since=-1.0), "since"),
        (pb.SetPauseRequest(timeout_seconds=math.inf), "timeout_seconds"),
        (pb.SetPauseRequest(timeout_seconds=-0.5), "timeout_seconds"),
        (pb.SetPauseRequest(mode=9), "mode"),  # type: ignore[arg-type]
    ],
)
async def test_a_field_out_of_range_is_named(keeper: PauseKeeper, request_: pb.SetPauseRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await keeper.set(request_)
    assert caught.value.field == field
    assert keeper.state.revision == 0


def test_tokens_of_two_versions_are_in_two_messages() -> None:
    old, new = WeightVersion("old", 0), WeightVersion("new", 1)
    items = [StreamItem(is_started=True)]
    for weights, reason in ((old, None), (old, None), (new, None), (new, FinishReason.ABORT)):
        items.append(StreamItem(SequenceUpdate("r", (), reason, 0), weights=weights))  # type: ignore[arg-type]
    handoff = _Handoff(None, KvReportBuilder("w"))
    first = list(_messages(items[:3], handoff))
    assert first == [], "neither tokens nor an end"
    (last,) = _messages(items[3:], handoff)
    assert (last.weight_version, last.finish_reason) == ("new", common_pb2.FINISH_REASON_ABORT)
