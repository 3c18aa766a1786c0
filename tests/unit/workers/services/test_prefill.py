"""The Prefill service over real gRPC and a real scheduler: ticket ids, offers, and unclaimed pages."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from harness.fakes.engines import an_engine, expected_tokens
from harness.idle import assert_idle

from kvferry.core.clock import SystemClock
from kvferry.core.errors import InvalidRequest, KvferryError, Unavailable
from kvferry.core.ids import new_incarnation
from kvferry.core.pausing import PauseMode, WeightVersion
from kvferry.core.sampling import SamplingParams
from kvferry.engine.engine import Engine
from kvferry.engine.loop.engine_loop import CommandQueue, EngineLoop
from kvferry.kv.handoff.offers import OfferState, OfferTimes
from kvferry.kv.interface.ticket import Keyring
from kvferry.kv.pages.layout import KvLayout
from kvferry.kv.registry import open_transport
from kvferry.rpc import wire
from kvferry.rpc.channel import open_channel
from kvferry.rpc.errors import error_from_rpc
from kvferry.rpc.server import Service, start_server
from kvferry.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from kvferry.workers.calls.context import UnitIdentity, WorkerContext
from kvferry.workers.handoff.offer_desk import OfferDesk
from kvferry.workers.handoff.page_publisher import PagePublisher
from kvferry.workers.handoff.prefill_progress import PrefillProgress
from kvferry.workers.services.prefill import PrefillService

LAYOUT = KvLayout("digest", "float32", num_layers=2, num_kv_heads=1, head_dim=4, block_tokens=4)
KEYRING = Keyring([b"k" * 16])
PROMPT = list(range(10))
WISHED = "0123456789abcdef" * 2


class Worker:
    """A prefill worker in this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.loop = EngineLoop(engine, CommandQueue(), name="engine under test", on_failure=lambda _: None)
        self.context = WorkerContext(
            unit=UnitIdentity(new_incarnation()),
            role="prefill",
            model="m",
            layout=LAYOUT,
            connector="memory",
            domain="",
            max_model_tokens=64,
            loop=self.loop,
            clock=SystemClock(),
        )
        self.desk = OfferDesk(self.context, KEYRING, OfferTimes(), open_transport("memory", new_incarnation()))
        self.stub: prefill_pb2_grpc.PrefillStub

    async def run(self, *, max_tokens: int = 9, **fields: object) -> prefill_pb2.PrefillResponse:
        sampling = wire.sampling_to_wire(SamplingParams(temperature=0.0, max_tokens=max_tokens))
        given = {"request_id": "r", "token_ids": PROMPT, "offer": True, "sampling": sampling, **fields}
        try:
            return await self.stub.Run(prefill_pb2.PrefillRequest(**given), timeout=30)  # type: ignore[arg-type]
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    async def release(self, ticket_id: str) -> None:
        await self.stub.Release(prefill_pb2.ReleaseRequest(ticket_id=ticket_id), timeout=30)


NO_DIGESTS = PagePublisher(memoryview(b""), 1, with_digests=False)


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    """A prefill worker. After the test, all offers must be released and the engine idle."""
    made = Worker(an_engine()[0])
    made.loop.start()
    service = PrefillService(made.context, made.desk, KEYRING, PrefillProgress(), NO_DIGESTS)
    server = await start_server(
        "127.0.0.1:0",
        [Service("kvferry.v1.Prefill", lambda s: prefill_pb2_grpc.add_PrefillServicer_to_server(service, s))],
    )
    async with open_channel(server.address) as channel:
        made.stub = prefill_pb2_grpc.PrefillStub(channel)
        yield made
    await server.stop(0)
    assert made.desk.is_idle
    await made.loop.stop()
    assert_idle(made.engine)


async def test_an_answer_has_the_first_token_and_a_ticket_with_the_requested_id(worker: Worker) -> None:
    answer = await worker.run(ticket_id=WISHED)
    assert answer.first_token.id == expected_tokens(PROMPT, 1)[0]
    assert answer.ticket_id == WISHED == KEYRING.open(answer.ticket).id
    assert KEYRING.open(answer.ticket).num_tokens == len(PROMPT)
    await worker.release(WISHED)


@pytest.mark.parametrize(
    "bad", [WISHED[:-1], WISHED + "0", WISHED.upper(), "g" * 32, WISHED + "\n", " " * 32, "٠" * 32, "0"]
)
async def test_an_invalid_ticket_id_is_refused_by_name_before_a_computation(worker: Worker, bad: str) -> None:
    with pytest.raises(InvalidRequest, match="ticket_id must be 32 hexadecimal digits, or empty, not ") as caught:
        await worker.run(ticket_id=bad)
    assert caught.value.field == "ticket_id"
    assert worker.desk.is_idle


async def test_an_id_in_use_is_replaced_and_its_offer_is_not_affected(worker: Worker) -> None:
    first = await worker.run(ticket_id=WISHED)
    second = await worker.run(ticket_id=WISHED)
    assert first.ticket_id == WISHED != second.ticket_id
    assert KEYRING.open(second.ticket).id == second.ticket_id
    assert worker.desk.count(OfferState.OFFERED) == 2
    await worker.release(second.ticket_id)
    assert worker.desk.claim(KEYRING.open(first.ticket).id, 1), "the first offer is not affected"
    worker.desk.finish(KEYRING.open(first.ticket).id, 1, done=True)


async def test_a_vector_of_a_prompt(worker: Worker) -> None:
    pooling = common_pb2.PoolingParams(pooling=common_pb2.POOLING_MEAN, normalize=False)
    request = prefill_pb2.PoolRequest(request_id="r", token_ids=[3, 4, 8], pooling=pooling)
    answer = await worker.stub.Pool(request, timeout=30)
    assert list(answer.values) == [5.0, 1.0]
    assert answer.prefill_seconds > 0
    request.pooling.Clear()
    assert list((await worker.stub.Pool(request, timeout=30)).values) == pytest.approx([0.970, 0.243], abs=1e-3)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"token_ids": []}, "prompt"),
        ({"token_ids": [97]}, "token_ids"),
        ({"token_ids": [1] * 129}, "prompt"),
        ({"token_ids": [1], "pooling": common_pb2.PoolingParams(pooling=9)}, "pooling"),  # type: ignore[arg-type]
        ({"token_ids": [1], "priority": 5000}, "priority"),
        ({"token_ids": [1], "scope": "x" * 2000}, "scope"),
    ],
)
async def test_a_refused_vector_names_the_field(worker: Worker, fields: dict[str, object], field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.stub.Pool(prefill_pb2.PoolRequest(**fields), timeout=30)  # type: ignore[arg-type]
    error = error_from_rpc(caught.value)
    assert isinstance(error, InvalidRequest)
    assert error.field == field


async def test_a_cancelled_vector_leaves_no_state(worker: Worker) -> None:
    calls = [
        worker.stub.Pool(prefill_pb2.PoolRequest(request_id=f"r{i}", token_ids=[5] * 100), timeout=30)
        for i in range(20)
    ]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_without_a_requested_id_the_worker_names_its_offers(worker: Worker) -> None:
    answers = [await worker.run() for _ in range(3)]
    assert len({a.ticket_id for a in answers}) == 3
    for answer in answers:
        await worker.release(answer.ticket_id)
        await worker.release(answer.ticket_id)


async def test_pages_are_released_if_no_offer_was_requested(worker: Worker) -> None:
    answer = await worker.run(offer=False, ticket_id=WISHED)
    assert (answer.ticket, answer.ticket_id) == (b"", "")


async def test_a_request_that_ends_with_its_first_token_leaves_no_offer(worker: Worker) -> None:
    answer = await worker.run(max_tokens=1, ticket_id=WISHED)
    assert answer.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert answer.ticket == b""


async def test_a_draining_worker_and_a_wrong_model_refuse(worker: Worker) -> None:
    with pytest.raises(KvferryError, match="not served here"):
        await worker.run(model="other")
    worker.context.draining = True
    with pytest.raises(Unavailable, match="draining"):
        await worker.run()


async def test_many_callers_at_once_each_get_an_offer_of_their_own(worker: Worker) -> None:
    answers = await asyncio.gather(*(worker.run(token_ids=[i, i + 1, i + 2], ticket_id=WISHED) for i in range(8)))
    assert len({a.ticket_id for a in answers}) == 8
    assert [a.first_token.id for a in answers] == [expected_tokens([i, i + 1, i + 2], 1)[0] for i in range(8)]
    for answer in answers:
        await worker.release(answer.ticket_id)


async def test_kv_of_other_weights_than_those_in_use_has_no_offer(worker: Worker) -> None:
    worker.loop.weights = WeightVersion("new", 1)  # as if they had changed while the answer was on its way
    answer = await worker.run()
    assert answer.first_token.id == expected_tokens(PROMPT, 1)[0]
    assert answer.ticket == b""
    assert worker.desk.is_idle


async def test_a_request_that_a_pause_ends_has_no_token(worker: Worker) -> None:
    await worker.loop.pause_generation(PauseMode.ABORT)
    answer = await worker.run(num_generated=1)
    assert not answer.HasField("first_token")
    assert (answer.finish_reason, answer.ticket) == (common_pb2.FINISH_REASON_ABORT, b"")
