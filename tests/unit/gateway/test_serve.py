import asyncio
import json
import logging
import os
import signal
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.fakes.byte_model import byte_model
from harness.fakes.scripted_gateway import scripted_gateway

from kvferry.core.errors import UsageError
from kvferry.gateway.decide.config import FleetConfig, GatewayConfig, HttpConfig
from kvferry.gateway.serve import Listening, run_gateway
from kvferry.rpc.channel import open_channel

_CHAT: dict[str, Any] = {
    "model": "bytes",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 8,
    "stream": True,
}


def config(http: str = "127.0.0.1:0", rpc: str = "127.0.0.1:0") -> GatewayConfig:
    return GatewayConfig(fleet=FleetConfig(), http=HttpConfig(address=http), grpc_address=rpc, drain_seconds=5.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_gateway_cleanly(number):
    announced: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(run_gateway(config(), byte_model(), announce=announced.set_result))
    async with asyncio.timeout(10):
        listening = await announced
        async with httpx.AsyncClient(base_url=f"http://{listening.http}") as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/ready")).status_code == 503
        os.kill(os.getpid(), number)
        await running
    assert not await accepts(listening.http)
    assert not await accepts(listening.grpc)


async def test_draining_lets_running_streams_end_and_refuses_new_work():
    async with scripted_gateway() as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        held = asyncio.Event()
        gateway.workers.decode[0].step = held.wait
        async with client.stream("POST", "/v1/chat/completions", json=_CHAT) as response:
            lines = response.aiter_lines()
            await anext(lines)
            stopping = asyncio.create_task(gateway.gateway.stop())
            async with asyncio.timeout(10):
                while await accepts(gateway.gateway.listening.http):
                    pass
            assert not stopping.done()
            held.set()
            rest = [line async for line in lines]
        assert rest[-2:] == ["data: [DONE]", ""]
        await stopping


async def test_ended_requests_are_written_to_the_request_trace(tmp_path):
    path = tmp_path / "requests.jsonl"
    async with (
        scripted_gateway(request_trace=(path, 1 << 20), tenant_key=b"secret of the tenants") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as client,
    ):
        for _ in range(2):
            assert (await client.post("/v1/chat/completions", json={**_CHAT, "stream": False})).status_code == 200
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["output_length"] == 8
    assert first["input_length"] > 0
    assert first["timestamp"] <= second["timestamp"]
    assert first["hash_ids"] == second["hash_ids"]


async def accepts(address: str) -> bool:
    host, port = address.split(":")
    try:
        _reader, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def test_a_stream_that_exceeds_the_grace_period_is_cut_and_leaves_no_state():
    async with (
        scripted_gateway(drain_seconds=0.2) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as client,
    ):
        gateway.workers.decode[0].step = asyncio.Event().wait
        async with client.stream("POST", "/v1/chat/completions", json=_CHAT) as response:
            await anext(response.aiter_lines())
            await gateway.gateway.stop()
        await gateway.idle()


async def test_health_over_grpc_agrees_with_ready():
    async with scripted_gateway() as gateway, open_channel(gateway.gateway.listening.grpc) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="kvferry.v1.Inference"))
        async with asyncio.timeout(10):
            while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                pass
            gateway.workers.decode[0].draining = True
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            gateway.workers.decode[0].draining = False
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


@pytest.mark.parametrize("side", ["http", "rpc"])
async def test_a_taken_port_is_a_usage_error_and_nothing_stays_open(side):
    async with scripted_gateway() as gateway:
        listening = gateway.gateway.listening
        taken = listening.http if side == "http" else listening.grpc
        with pytest.raises(UsageError, match="cannot listen"):
            await run_gateway(config(**{side: taken}), byte_model(), stop=asyncio.Event())


async def test_a_bad_http_address_is_a_usage_error():
    with pytest.raises(UsageError, match="host:port"):
        await run_gateway(config(http="somewhere"), byte_model(), stop=asyncio.Event())


async def test_reflection_is_served():
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async with scripted_gateway() as gateway, open_channel(gateway.gateway.listening.grpc) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        reply = await call.read()
        assert reply is not grpc.aio.EOF
        assert "kvferry.v1.Inference" in {service.name for service in reply.list_services_response.service}
        call.cancel()


async def test_clients_that_leave_cause_no_log_lines(caplog):
    async with scripted_gateway():
        logging.getLogger("asyncio").warning("socket.send() raised exception.")
        logging.getLogger("asyncio").warning("something else")
    assert [record.message for record in caplog.records if record.name == "asyncio"] == ["something else"]
