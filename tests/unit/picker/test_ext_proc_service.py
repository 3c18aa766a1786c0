"""The external processing service over gRPC, without a proxy."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.servers.picker_client import (
    body_message,
    destination,
    head_message,
    headers_of,
    picker_stub,
    read,
    response_message,
)
from harness.waiting import eventually

from kvferry.core.clock import SystemClock
from kvferry.picker.config import PickerConfig, ScrapeConfig
from kvferry.picker.decide.endpoints import PoolEndpoint
from kvferry.picker.decide.engine_metrics import EngineLoad
from kvferry.picker.decide.exchange import BodyMode
from kvferry.picker.decide.saturation import SaturationConfig
from kvferry.picker.picker_process import EXT_PROC, LIVENESS, READINESS, Picker, run_picker
from kvferry.rpc.health import wait_serving
from kvferry.v1 import ext_proc_pb2 as pb

# Addresses of documentation, which no scrape reaches: loads are set by the tests.
A, B, C = (f"192.0.2.{number}:8000" for number in (1, 2, 3))
SECONDS = 20.0
CONFIG = PickerConfig(
    endpoints=[PoolEndpoint(address, address, "127.0.0.1:1") for address in (A, B)],
    is_plaintext=True,
    scrape=ScrapeConfig(seconds=60.0),
    drain_seconds=0.5,
)


@asynccontextmanager
async def picker_of(config: PickerConfig = CONFIG) -> AsyncIterator[Picker]:
    picker = await Picker.start(config, SystemClock())
    try:
        yield picker
    finally:
        await picker.stop()


def page(picker: Picker, address: str, running: int = 0, waiting: int = 0) -> None:
    load = EngineLoad("vllm", running, waiting)
    now = picker._clock.monotonic()
    picker.pool.states.scraped(address, load, str(now).encode(), now)
    picker.pool.loads_changed()


async def idle(picker: Picker) -> None:
    def is_idle() -> bool:
        return not (picker.pool.states.num_open or picker.service.num_streams or len(picker.pool.queue))

    await eventually(is_idle, SECONDS)


async def test_one_request_from_its_headers_to_the_end_of_the_response():
    async with picker_of() as picker, picker_stub(picker.listening.grpc) as stub:
        page(picker, A, running=50)
        page(picker, B)
        call = stub.open()
        await call.write(head_message({"x-gateway-inference-objective": "x", "x-prefiller-host-port": "evil:1"}))
        await call.write(body_message(b'{"prompt":', is_end=False))
        await call.write(body_message(b'"x"}'))
        first = await read(call)
        assert destination(first) == B
        removed = first.request_headers.response.header_mutation.remove_headers
        assert {"x-gateway-inference-objective", "x-prefiller-host-port"} <= set(removed)
        parts = [(await read(call)).request_body.response.body_mutation.streamed_response for _ in range(2)]
        assert [(part.body, part.end_of_stream) for part in parts] == [(b'{"prompt":', False), (b'"x"}', True)]
        assert picker.pool.states.num_open == 1
        await call.write(response_message(200, B))
        assert (await read(call)).WhichOneof("response") == "response_headers"
        await call.done_writing()
        await idle(picker)


async def test_a_proxy_that_does_not_say_how_it_sends_bodies_is_taken_as_full_duplex():
    async with picker_of() as picker, picker_stub(picker.listening.grpc) as stub:
        call = stub.open()
        await call.write(head_message(mode=None))
        await call.write(body_message(b"{}"))
        assert destination(await read(call)) in (A, B)
        call.cancel()
        await idle(picker)


@pytest.mark.parametrize(("said", "fixed"), [(2, None), (4, BodyMode.BUFFERED), (None, BodyMode.BUFFERED)])
async def test_a_buffered_body_whether_the_proxy_says_so_or_a_setting(said, fixed):
    async with picker_of(replace(CONFIG, body_mode=fixed)) as picker, picker_stub(picker.listening.grpc) as stub:
        call = stub.open()
        await call.write(head_message(mode=said))
        assert headers_of(await read(call)) == {}
        await call.write(body_message(b"{}"))
        answer = await read(call)
        assert answer.WhichOneof("response") == "request_body"
        assert destination(answer) in (A, B)
        assert not answer.request_body.response.HasField("body_mutation")
        call.cancel()
        await idle(picker)


@pytest.mark.parametrize("subset", [[B], B, f"{B},192.0.2.9:1"])
async def test_the_subset_of_the_metadata(subset):
    async with picker_of() as picker, picker_stub(picker.listening.grpc) as stub:
        call = stub.open()
        await call.write(head_message(is_end=True, subset=subset))
        assert destination(await read(call)) == B
        call.cancel()
        await idle(picker)


async def test_the_subset_of_the_header_and_that_of_the_metadata_first():
    async with picker_of() as picker, picker_stub(picker.listening.grpc) as stub:
        header = {"x-gateway-destination-endpoint-subset": A}
        for subset, wanted in ((None, A), ([B], B)):
            call = stub.open()
            await call.write(head_message(header, is_end=True, subset=subset))
            assert destination(await read(call)) == wanted
            call.cancel()
        await idle(picker)


@pytest.mark.parametrize("subset", [[], "", ["192.0.2.9:1"]])
async def test_a_subset_without_an_endpoint_of_the_pool_is_refused(subset):
    async with picker_of() as picker, picker_stub(picker.listening.grpc) as stub:
        call = stub.open()
        await call.write(head_message(is_end=True, subset=subset))
        answer = await read(call)
        assert answer.immediate_response.status.code == 503
        assert answer.immediate_response.details == "subset_empty"
        await idle(picker)


async def test_messages_out_of_order_end_the_stream():
    async with picker_of() as picker, picker_stub(picker.listening.grpc) as stub:
        call = stub.open()
        await call.write(body_message(b"x"))
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        await idle(picker)


async def test_a_message_of_an_unknown_kind_is_ignored_and_observed_ones_are_not_counted():
    async with picker_of() as picker, picker_stub(picker.listening.grpc) as stub:
        call = stub.open()
        await call.write(pb.ProcessingRequest())
        observed = head_message(is_end=True)
        observed.observability_mode = True
        await call.write(observed)
        await call.write(head_message(is_end=True))
        assert destination(await read(call)) in (A, B)
        assert picker.pool.states.num_open == 1
        call.cancel()
        await idle(picker)


async def test_a_stream_that_is_cancelled_at_any_message_leaves_nothing():
    messages = [head_message(), body_message(b"{}", is_end=False), body_message(b"{}"), response_message(is_end=False)]
    async with picker_of() as picker, picker_stub(picker.listening.grpc) as stub:
        for count in range(len(messages) + 1):
            call = stub.open()
            for message in messages[:count]:
                await call.write(message)
            call.cancel()
            await idle(picker)
        assert picker.pool.states.commitments.count == 0


SATURATED = replace(
    CONFIG, saturation=SaturationConfig(objectives={"batch": -1, "high": 5}, queue_seconds=30.0, max_queued=1)
)


def full(picker: Picker) -> None:
    for address in (A, B):
        page(picker, address, running=8, waiting=9)


async def test_a_full_pool_sheds_and_lets_others_wait_until_there_is_room():
    async with picker_of(SATURATED) as picker, picker_stub(picker.listening.grpc) as stub:
        full(picker)
        shed = stub.open()
        await shed.write(head_message({"x-gateway-inference-objective": "batch"}, is_end=True))
        refused = (await read(shed)).immediate_response
        assert refused.status.code == 429
        found = {option.header.key: option.header.raw_value for option in refused.headers.set_headers}
        assert found["retry-after"] == b"1"
        waits = stub.open()
        await waits.write(head_message(is_end=True))
        await eventually(lambda: len(picker.pool.queue) > 0, SECONDS)
        page(picker, A)
        assert destination(await read(waits)) in (A, B)
        waits.cancel()
        await idle(picker)


async def test_a_displaced_request_is_refused_and_a_cancelled_one_leaves_the_queue():
    async with picker_of(SATURATED) as picker, picker_stub(picker.listening.grpc) as stub:
        full(picker)
        low = stub.open()
        await low.write(head_message(is_end=True))
        await eventually(lambda: len(picker.pool.queue) > 0, SECONDS)
        high = stub.open()
        await high.write(head_message({"x-gateway-inference-objective": "high"}, is_end=True))
        assert (await read(low)).immediate_response.details == "displaced"
        high.cancel()
        await idle(picker)


async def test_a_wait_that_is_too_long_passes():
    short = replace(SATURATED, saturation=replace(SATURATED.saturation, queue_seconds=0.05))
    async with picker_of(short) as picker, picker_stub(picker.listening.grpc) as stub:
        full(picker)
        call = stub.open()
        await call.write(head_message(is_end=True))
        assert destination(await read(call)) in (A, B)
        call.cancel()
        await idle(picker)


async def _status(address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        found = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return int(found.status)


async def test_health_by_the_names_of_the_protocol():
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with picker_of(replace(CONFIG, health="127.0.0.1:0")) as picker:
        await wait_serving(picker.listening.health, SECONDS, READINESS)
        for address in (picker.listening.grpc, picker.listening.health):
            for name in ("", EXT_PROC, READINESS, LIVENESS):
                assert await _status(address, name) == serving
        picker.members.is_known = False
        async with asyncio.timeout(SECONDS), grpc.aio.insecure_channel(picker.listening.health) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=READINESS))
            assert await anext(found async for found in watch if found.status == not_serving)
        assert await _status(picker.listening.health, LIVENESS) == serving


async def test_a_picker_that_stops_finishes_open_requests():
    stop, bound = asyncio.Event(), asyncio.get_running_loop().create_future()
    running = asyncio.create_task(
        run_picker(replace(CONFIG, drain_seconds=SECONDS), announce=bound.set_result, stop=stop)
    )
    address = (await bound).grpc
    async with picker_stub(address) as stub:
        call = stub.open()
        await call.write(head_message(is_end=True))
        await read(call)
        stop.set()
        await asyncio.sleep(0)
        await call.write(response_message())
        assert (await read(call)).WhichOneof("response") == "response_headers"
        await call.done_writing()
        assert await call.code() == grpc.StatusCode.OK
    async with asyncio.timeout(SECONDS):
        await running


async def test_bodies_that_are_held_have_a_bound_over_all_streams(monkeypatch):
    monkeypatch.setattr("kvferry.picker.ext_proc_service._MAX_HELD_BYTES", 3000)
    async with picker_of() as picker, picker_stub(picker.listening.grpc) as stub:
        calls = [stub.open() for _ in range(3)]
        for number, call in enumerate(calls):
            await call.write(head_message())
            await call.write(body_message(b"x" * 2000, is_end=False))
            await eventually(lambda number=number: picker.service.num_held_bytes == 2000 * (number + 1), SECONDS)  # type: ignore[misc]
            if number == 1:
                break
        late = calls[2]
        await late.write(head_message())
        await late.write(body_message(b"y" * 10, is_end=False))
        assert destination(await read(late)) in (A, B)
        assert (await read(late)).request_body.response.body_mutation.streamed_response.body == b"y" * 10
        for call in calls:
            call.cancel()
        await idle(picker)
        assert picker.service.num_held_bytes == 0
