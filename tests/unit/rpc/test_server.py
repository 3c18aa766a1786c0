import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from harness.servers.rpc_errors import failure

from kvferry.core.errors import InvalidRequest, Overloaded, UsageError
from kvferry.rpc.access.call_keys import CallVerifier
from kvferry.rpc.channel import open_channel
from kvferry.rpc.server import Service, start_server
from kvferry.v1 import inference_pb2, inference_pb2_grpc
from kvferry.v1.inference_pb2 import GenerateRequest, GenerateResponse

_NAME = "kvferry.v1.Inference"


class Panic(BaseException):
    """An error like the panics of extension modules, which is not an Exception."""


class Servicer(inference_pb2_grpc.InferenceServicer):
    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.started = asyncio.Event()
        self.go_on = asyncio.Event()

    async def Generate(self, request: GenerateRequest, context: Any) -> AsyncIterator[GenerateResponse]:
        try:
            yield GenerateResponse(text="a")
            self.started.set()
            if request.model == "crash":
                raise RuntimeError("a secret detail")
            if request.model == "panic":
                raise Panic("a secret detail")
            if request.model == "busy":
                raise Overloaded("no room for 12 blocks; 3 are free", retry_after_seconds=1.5)
            await self.go_on.wait()
            yield GenerateResponse(text="b")
        finally:
            self.closed.set()

    async def Tokenize(self, request: Any, context: Any) -> inference_pb2.TokenizeResponse:
        raise InvalidRequest("text is empty; give at least one character", field="text")

    async def Detokenize(self, request: Any, context: Any) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse(text="x")

    async def GetModelInfo(self, request: Any, context: Any) -> inference_pb2.GetModelInfoResponse:
        raise ZeroDivisionError("a secret detail")


@pytest.fixture
async def servicer() -> Servicer:
    return Servicer()


@pytest.fixture
async def server(servicer: Servicer):
    add = inference_pb2_grpc.add_InferenceServicer_to_server
    running = await start_server("127.0.0.1:0", [Service(_NAME, lambda s: add(servicer, s))])
    yield running
    await running.stop(0)


@pytest.fixture
async def channel(server):
    async with open_channel(server.address) as opened:
        yield opened


@pytest.fixture
def stub(channel):
    return inference_pb2_grpc.InferenceStub(channel)


async def test_an_error_arrives_with_its_class_field_and_reason(stub):
    error = await failure(stub.Tokenize(inference_pb2.TokenizeRequest()))
    assert isinstance(error, InvalidRequest)
    assert (error.field, error.reason) == ("text", "INVALID_REQUEST")
    assert "at least one character" in error.message


async def test_an_error_in_the_middle_of_a_stream_has_its_retry_time(stub):
    error = await failure(stub.Generate(GenerateRequest(model="busy")))
    assert isinstance(error, Overloaded)
    assert error.retry_after_seconds == 1.5


@pytest.mark.parametrize("streaming", [True, False])
async def test_an_unexpected_exception_is_internal_and_hides_its_details(stub, caplog, streaming):
    call = (
        stub.Generate(GenerateRequest(model="crash", request_id="req-7"))
        if streaming
        else stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), metadata=(("x-request-id", "req-7"),))
    )
    error = await failure(call)
    assert error.grpc_status == "INTERNAL"
    assert "secret" not in error.message
    logged = [record for record in caplog.records if record.exc_info]
    assert [record.request_id for record in logged] == ["req-7"]


async def test_an_exception_that_is_no_exception_ends_the_call_too(stub):
    error = await asyncio.wait_for(failure(stub.Generate(GenerateRequest(model="panic"))), 10)
    assert error.grpc_status == "INTERNAL"
    assert "secret" not in error.message


@pytest.mark.parametrize("garbage", [b"\xff" * 50, b"\x0a\xff\xff\xff\xff\x0f"])
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("kvferry.v1.Inference/Tokenize", "unary_unary"),
        ("kvferry.v1.Inference/Generate", "unary_stream"),
        ("grpc.health.v1.Health/Check", "unary_unary"),
        ("grpc.health.v1.Health/Watch", "unary_stream"),
        ("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "stream_stream"),
    ],
)
async def test_bytes_that_are_no_message_are_an_invalid_request(server, channel, caplog, method, kind, garbage):
    caplog.set_level("INFO")
    call = getattr(channel, kind)(f"/{method}", None, None)(iter([garbage]) if kind == "stream_stream" else garbage)
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not a valid message of this method" in await call.details()
    ours = [record for record in caplog.records if record.name.startswith("kvferry")]
    assert [(record.levelname, record.exc_info) for record in ours] == [("INFO", None)]
    async with asyncio.timeout(10):  # the answer may arrive before the server has ended the call
        while server.calls.count:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_message_of_too_many_elements_is_refused_before_it_is_parsed(stub):
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage()] * 190_000)
    error = await failure(stub.Generate(GenerateRequest(chat=chat)))
    assert (error.grpc_status, error.reason) == ("INVALID_ARGUMENT", "TOO_MANY_ELEMENTS")


async def test_cancelling_a_stream_closes_the_servicers_generator(server, servicer, stub):
    call = stub.Generate(GenerateRequest())
    await call.read()
    await servicer.started.wait()
    assert server.calls.count == 1
    call.cancel()
    await asyncio.wait_for(servicer.closed.wait(), 5)
    await asyncio.wait_for(server.calls.wait_idle(), 5)


async def test_a_deadline_closes_the_servicers_generator(servicer, stub):
    error = await failure(stub.Generate(GenerateRequest(), timeout=0.2))
    assert error.grpc_status == "DEADLINE_EXCEEDED"
    await asyncio.wait_for(servicer.closed.wait(), 5)


async def test_health_follows_readiness_per_service(server, channel):
    health = health_pb2_grpc.HealthStub(channel)

    async def status(name: str) -> int:
        return (await health.Check(health_pb2.HealthCheckRequest(service=name))).status

    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert await status("") == await status(_NAME) == not_serving
    await server.set_ready(True)
    assert await status("") == await status(_NAME) == serving
    await server.set_ready(False, _NAME)
    assert (await status(""), await status(_NAME)) == (serving, not_serving)


async def test_an_unimplemented_method_of_health_is_reported(channel, caplog):
    call = health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not [record for record in caplog.records if record.exc_info]


async def test_reflection_lists_the_services(channel):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = {service.name async for reply in call for service in reply.list_services_response.service}
    assert {_NAME, "grpc.health.v1.Health"} <= names


async def test_stop_lets_a_running_stream_end(server, servicer, stub):
    call = stub.Generate(GenerateRequest())
    await call.read()
    stopping = asyncio.create_task(server.stop(30))
    servicer.go_on.set()
    assert (await call.read()).text == "b"
    assert await call.read() is grpc.aio.EOF
    await asyncio.wait_for(stopping, 5)


async def test_stop_does_not_wait_for_health_watchers(server, channel):
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
    await watch.read()
    await asyncio.wait_for(server.stop(30), 5)


async def test_stop_cancels_what_outlives_the_grace(server, servicer, stub):
    call = stub.Generate(GenerateRequest())
    await call.read()
    await asyncio.wait_for(server.stop(0.05), 5)
    assert servicer.closed.is_set()


async def test_a_taken_port_is_a_usage_error(server):
    with pytest.raises(UsageError, match="cannot listen"):
        await start_server(server.address, [])


@pytest.mark.parametrize("address", ["nowhere", "host:", "host:99999", ":x"])
async def test_a_bad_address_is_a_usage_error(address):
    with pytest.raises(UsageError, match="host:port"):
        await start_server(address, [])


async def opened(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open an HTTP/2 connection without a call: the preface and empty settings."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    await writer.drain()
    return reader, writer


async def test_connections_above_the_limit_are_closed(servicer):
    add = inference_pb2_grpc.add_InferenceServicer_to_server
    server = await start_server("127.0.0.1:0", [Service(_NAME, lambda s: add(servicer, s))], max_connections=4)
    kept = [await opened(server.address) for _ in range(4)]
    for reader, _ in kept:
        assert await asyncio.wait_for(reader.read(9), 10)  # the server's settings frame
    for _ in range(20):
        reader, writer = await opened(server.address)
        assert await asyncio.wait_for(reader.read(9), 10) == b""
        writer.close()
    for _, writer in kept:
        writer.close()

    async with open_channel(server.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        # The server notices closed connections with a delay; meanwhile the channel reconnects.
        await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1]), timeout=20, wait_for_ready=True)
    await server.stop(0)


async def test_a_connection_without_calls_is_closed(servicer):
    add = inference_pb2_grpc.add_InferenceServicer_to_server
    server = await start_server("127.0.0.1:0", [Service(_NAME, lambda s: add(servicer, s))], idle_seconds=0.2)
    reader, writer = await opened(server.address)
    assert await asyncio.wait_for(reader.read(), 20) != b""  # settings and GOAWAY, then the end of file
    writer.close()
    await server.stop(0)


def headers_frame(path: bytes) -> bytes:
    """Return the frame that begins a call, in literal HPACK."""

    def text(value: bytes) -> bytes:
        return bytes([len(value)]) + value

    block = b"\x83\x86" + b"\x04" + text(path) + b"\x01" + text(b"x") + b"\x00" + text(b"te") + text(b"trailers")
    block += b"\x0f\x10" + text(b"application/grpc")
    return len(block).to_bytes(3, "big") + b"\x01\x04" + (1).to_bytes(4, "big") + block


@pytest.mark.parametrize("path", [b"/\xff", b"/\xed\xa0\x80"])
async def test_a_method_that_is_not_utf8_is_rejected_without_effect_on_others(server, servicer, stub, path, caplog):
    running = stub.Generate(GenerateRequest())
    await running.read()
    for _ in range(20):
        reader, writer = await opened(server.address)
        writer.write(headers_frame(path))
        await writer.drain()
        await asyncio.wait_for(reader.readuntil(b"the method does not exist"), 10)
        writer.close()
        request = inference_pb2.DetokenizeRequest(token_ids=[1])
        assert (await stub.Detokenize(request, timeout=20)).text == "x"
    assert not running.done()
    running.cancel()
    await asyncio.wait_for(servicer.closed.wait(), 5)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_unknown_methods_are_unimplemented(channel, caplog):
    calls = [channel.unary_unary("/kvferry.v1.Inference/Generale")(b"x") for _ in range(50)]
    assert {await call.code() for call in calls} == {grpc.StatusCode.UNIMPLEMENTED}
    assert await calls[0].details() == "the method does not exist; see proto/kvferry/v1"
    assert await channel.unary_unary("no method")(b"x").code() is grpc.StatusCode.UNIMPLEMENTED
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_caller_of_an_unknown_method_may_disconnect(server, stub, caplog):
    for _ in range(20):
        _, writer = await opened(server.address)
        writer.write(headers_frame(b"/a/b"))
        await writer.drain()
        writer.close()
    assert (await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1]), timeout=20)).text == "x"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_server_that_ends_by_itself_is_started_again(server, caplog):
    def fail(*_: object) -> None:
        raise RuntimeError("no calls")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvferry.rpc.unknown_methods._Core._make_request_call_future", fail)
        async with open_channel(server.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            with suppress(grpc.RpcError):  # the loop ends with this call
                await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1]), timeout=5)
    async with open_channel(server.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.DetokenizeRequest(token_ids=[1])
        assert (await stub.Detokenize(request, timeout=20, wait_for_ready=True)).text == "x"
    assert "started again" in caplog.text


async def test_a_rejected_call_is_answered_before_its_message_has_arrived(servicer):
    add = inference_pb2_grpc.add_InferenceServicer_to_server
    service = Service(_NAME, lambda s: add(servicer, s))
    server = await start_server("127.0.0.1:0", [service], verifier=CallVerifier([b"s" * 16]))
    reader, writer = await opened(server.address)
    writer.write(headers_frame(b"/kvferry.v1.Inference/Tokenize"))
    writer.write((5).to_bytes(3, "big") + b"\x00\x00" + (1).to_bytes(4, "big") + b"\x00" + (1 << 20).to_bytes(4, "big"))
    await writer.drain()
    answered = b""
    while b"grpc-status" not in answered:
        part = await asyncio.wait_for(reader.read(1 << 16), 10)
        assert part, "the connection was closed without an answer"
        answered += part
    writer.close()
    await server.stop(0)
