"""`WorkerAdmin.PinPrefix` and `UnpinPrefix` over real gRPC: pins, refusals by field, draining, abandoned calls."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from harness.engines.held_runner import HeldRunner
from harness.fakes.engines import ArithmeticRunner, an_engine, small_limits
from harness.idle import assert_idle
from harness.waiting import eventually

from kvferry.core.clock import SystemClock
from kvferry.core.errors import InvalidRequest, KvferryError, Overloaded, Unavailable, UnknownModel
from kvferry.core.ids import new_incarnation
from kvferry.engine.engine import Engine
from kvferry.engine.loop.engine_loop import CommandQueue, EngineLoop
from kvferry.kv.handoff.offers import OfferTimes
from kvferry.kv.interface.ticket import Keyring
from kvferry.kv.pages.layout import KvLayout
from kvferry.kv.registry import open_transport
from kvferry.rpc.access.call_keys import CallVerifier
from kvferry.rpc.call_interceptor import OpenCalls
from kvferry.rpc.channel import open_channel
from kvferry.rpc.errors import error_from_rpc
from kvferry.rpc.server import Service, start_server
from kvferry.v1 import common_pb2, worker_admin_pb2, worker_admin_pb2_grpc
from kvferry.workers.calls.context import MAX_SCOPE_CHARS, UnitIdentity, WorkerContext
from kvferry.workers.handoff.offer_desk import OfferDesk
from kvferry.workers.services.admin import AdminService

SECONDS = 30.0
LAYOUT = KvLayout("digest", "float32", num_layers=2, num_kv_heads=1, head_dim=4, block_tokens=4)
PREFIX = [7, *range(13)]


class Worker:
    """The admin service of a worker in this process."""

    def __init__(self, engine: Engine, runner: ArithmeticRunner) -> None:
        self.engine, self.runner = engine, runner
        self.loop = EngineLoop(engine, CommandQueue(), name="engine under test", on_failure=lambda _: None)
        context = WorkerContext(
            unit=UnitIdentity(new_incarnation()),
            role="prefill",
            model="m",
            layout=LAYOUT,
            connector="memory",
            domain="",
            max_model_tokens=128,
            loop=self.loop,
            clock=SystemClock(),
        )
        desk = OfferDesk(context, Keyring([b"k" * 16]), OfferTimes(), open_transport("memory", new_incarnation()))

        async def drained() -> None:
            pass

        self.service = AdminService(context, desk, OpenCalls(), CallVerifier([b"s" * 16]), on_drain=drained)
        self.stub: worker_admin_pb2_grpc.WorkerAdminStub

    async def pin(self, **fields: object) -> worker_admin_pb2.PinnedPrefix:
        given = {"token_ids": PREFIX, "ttl_seconds": 60.0, **fields}
        try:
            request = worker_admin_pb2.PinPrefixRequest(**given)  # type: ignore[arg-type]
            return (await self.stub.PinPrefix(request, timeout=SECONDS)).pin  # type: ignore[misc]
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    async def unpin(self, **fields: object) -> worker_admin_pb2.UnpinPrefixResponse:
        try:
            request = worker_admin_pb2.UnpinPrefixRequest(**fields)  # type: ignore[arg-type]
            return await self.stub.UnpinPrefix(request, timeout=SECONDS)  # type: ignore[misc]
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    """A worker whose engine must be idle after the test."""
    made = Worker(*an_engine(limits=small_limits(max_chunk_tokens=4)))
    made.loop.start()
    server = await start_server(
        "127.0.0.1:0",
        [
            Service(
                "kvferry.v1.WorkerAdmin",
                lambda s: worker_admin_pb2_grpc.add_WorkerAdminServicer_to_server(made.service, s),
            )
        ],
    )
    async with open_channel(server.address) as channel:
        made.stub = worker_admin_pb2_grpc.WorkerAdminStub(channel)
        yield made
    await server.stop(0)
    await made.loop.stop()
    assert_idle(made.engine)


async def test_a_pin_is_answered_with_its_size_and_its_time_to_live(worker: Worker) -> None:
    pin = await worker.pin()
    assert (pin.num_tokens, pin.num_blocks, len(pin.name)) == (12, 3, 32)
    assert 0 < pin.seconds_left <= 60.0
    again = await worker.pin(ttl_seconds=600.0)
    assert again.name == pin.name
    assert again.seconds_left > 60.0
    load = worker.service.status().load
    assert (load.pins, load.blocks_pinned, load.blocks_free, load.blocks_total) == (1, 3, 61, 64)
    ended = await worker.unpin(token_ids=PREFIX)
    assert ended.pin.name == pin.name
    assert not (await worker.unpin(token_ids=PREFIX)).HasField("pin")
    assert worker.engine.load().pins == 0


async def test_a_pin_expires_in_an_idle_worker(worker: Worker) -> None:
    await worker.pin(ttl_seconds=0.05)  # on a busy machine it may expire before its last step has ended

    def is_free() -> bool:
        load = worker.service.status().load
        return (load.pins, load.blocks_free) == (0, 64)

    await eventually(is_free)


ADAPTER = common_pb2.Adapter(name="a", digest=b"1" * 32)


@pytest.mark.parametrize(
    ("fields", "kind", "field"),
    [
        ({"token_ids": []}, InvalidRequest, "token_ids"),
        ({"token_ids": [1, 2, 3]}, InvalidRequest, "token_ids"),
        ({"token_ids": [1, 2, 3, 97]}, InvalidRequest, "token_ids"),
        ({"token_ids": [1] * ((1 << 20) + 1)}, InvalidRequest, "token_ids"),
        ({"token_ids": [1] * 128}, InvalidRequest, "prompt"),
        ({"ttl_seconds": 0.0}, InvalidRequest, "ttl_seconds"),
        ({"ttl_seconds": -1.0}, InvalidRequest, "ttl_seconds"),
        ({"ttl_seconds": 604801.0}, InvalidRequest, "ttl_seconds"),
        ({"ttl_seconds": float("nan")}, InvalidRequest, "ttl_seconds"),
        ({"ttl_seconds": float("inf")}, InvalidRequest, "ttl_seconds"),
        ({"scope": "t" * (MAX_SCOPE_CHARS + 1)}, InvalidRequest, "scope"),
        ({"scope": "t\x1e" + "0" * 32}, InvalidRequest, "scope"),
        ({"model": "other"}, UnknownModel, "model"),
        ({"adapter": ADAPTER}, UnknownModel, "model"),
        ({"adapter": common_pb2.Adapter(name="", digest=b"1" * 32)}, InvalidRequest, "adapter"),
        ({"adapter": common_pb2.Adapter(name="a", digest=b"1")}, InvalidRequest, "adapter"),
    ],
)
async def test_an_invalid_pin_is_refused_by_field(
    worker: Worker, fields: dict[str, object], kind: type[KvferryError], field: str
) -> None:
    with pytest.raises(kind) as caught:
        await worker.pin(**fields)
    assert caught.value.field == field
    assert worker.engine.load().pins == 0


async def test_an_invalid_unpin_is_refused_by_field(worker: Worker) -> None:
    for fields, field in (({"token_ids": []}, "token_ids"), ({"token_ids": PREFIX, "scope": "t" * 999}, "scope")):
        with pytest.raises(InvalidRequest) as caught:
            await worker.unpin(**fields)
        assert caught.value.field == field


async def test_a_full_quota_is_reported_with_its_numbers(worker: Worker) -> None:
    await worker.pin()
    with pytest.raises(Overloaded, match="needs 14 more pages, but pins may use 16 pages and use 3") as caught:
        await worker.pin(token_ids=list(range(40, 96)))
    assert caught.value.reason == "PIN_QUOTA"


async def test_a_draining_worker_ends_its_pins_and_refuses_others(worker: Worker) -> None:
    await worker.pin()
    assert await worker.service.drain(SECONDS)
    assert worker.engine.allocator.pool.is_idle
    with pytest.raises(Unavailable, match="draining"):
        await worker.pin()


async def test_a_prefix_that_is_computed_while_the_worker_begins_to_drain_is_not_pinned(worker: Worker) -> None:
    held = worker.runner.run = HeldRunner(worker.runner)  # type: ignore[method-assign, assignment]
    pinning = asyncio.create_task(worker.pin())
    await held.wait_reached()
    draining = asyncio.create_task(worker.service.drain(SECONDS))
    await asyncio.sleep(0)  # lets `drain` post its command
    held.go.set()
    assert await draining
    with pytest.raises(Unavailable, match="draining and pins no prefixes"):
        await pinning
    assert worker.engine.allocator.pool.is_idle


async def test_an_abandoned_call_computes_and_pins_nothing_more(worker: Worker) -> None:
    held = worker.runner.run = HeldRunner(worker.runner)  # type: ignore[method-assign, assignment]
    call = worker.stub.PinPrefix(worker_admin_pb2.PinPrefixRequest(token_ids=PREFIX, ttl_seconds=60.0), timeout=SECONDS)
    waiting = asyncio.ensure_future(call)
    await held.wait_reached()
    waiting.cancel()
    await eventually(lambda: worker.loop._replies == set())
    held.go.set()
    await eventually(lambda: worker.engine.is_idle)
    assert worker.engine.load().pins == 0
