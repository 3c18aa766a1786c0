"""The picker, its endpoints and its proxies are killed or stopped; requests and counts survive as far as they can."""

import asyncio
import signal
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from harness.servers.envoy import EnvoyMode, envoy, envoy_path
from harness.servers.model_server import ModelServer, model_servers
from harness.servers.picker_client import destination, head_message, picker_stub, read
from harness.servers.processes import RunningProcess, running
from harness.waiting import eventually

SECONDS = 30.0
FLAGS = ("picker", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--plaintext", "--scrape-seconds", "0.05")
pytestmark = pytest.mark.skipif(envoy_path() is None, reason="Envoy is not installed")


async def listening(process: RunningProcess) -> dict[str, str]:
    found = await asyncio.to_thread(process.wait_for, "listening")
    return {name: str(value) for name, value in found.items()}


async def gateway(stack: AsyncExitStack, picker: str, folder: Path, mode: EnvoyMode) -> httpx.AsyncClient:
    url = await stack.enter_async_context(envoy(picker, folder, mode))
    return await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=SECONDS))


async def sample(address: str, name: str) -> float:
    async with httpx.AsyncClient() as http:
        page = (await http.get(f"http://{address}/metrics")).text
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))
    )


async def until_sample(address: str, name: str, value: float) -> None:
    async with asyncio.timeout(SECONDS):
        while await sample(address, name) != value:
            pass


async def test_a_picker_that_stops_gracefully_loses_no_request(tmp_path):
    server = ModelServer(gate=asyncio.Event())
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(model_servers(server))
        picker = stack.enter_context(running(*FLAGS, "--endpoints", server.address))
        http = await gateway(stack, (await listening(picker))["grpc"], tmp_path, EnvoyMode())
        async with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines)
            picker.process.send_signal(signal.SIGTERM)
            server.gate.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert await asyncio.to_thread(picker.stop) == 0


NO_ANSWERS = EnvoyMode(response_body="NONE", fails_open=True)


@pytest.mark.parametrize("mode", [NO_ANSWERS, replace(NO_ANSWERS, body="BUFFERED")], ids=["duplex", "buffered"])
async def test_a_picker_that_is_killed_ends_no_answer_that_has_begun(mode, tmp_path):
    """If the gateway does not send it the bodies of answers, and fails open; otherwise Envoy ends the answer."""
    server = ModelServer(gate=asyncio.Event())
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(model_servers(server))
        picker = stack.enter_context(running(*FLAGS, "--endpoints", server.address))
        http = await gateway(stack, (await listening(picker))["grpc"], tmp_path, mode)
        async with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines)
            picker.process.kill()
            await asyncio.to_thread(picker.process.wait, SECONDS)
            server.gate.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"


async def test_a_proxy_that_is_killed_leaves_no_request_counted(tmp_path):
    server = ModelServer(gate=asyncio.Event())
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(model_servers(server))
        picker = stack.enter_context(running(*FLAGS, "--endpoints", server.address))
        bound = await listening(picker)
        async with AsyncExitStack() as proxy:
            http = await gateway(proxy, bound["grpc"], tmp_path, EnvoyMode())
            async with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
                lines = answer.aiter_lines()  # kept: the end of the iterator closes the answer
                assert await anext(lines)
                await until_sample(bound["metrics"], "kvferry_picker_open_requests", 1.0)
        await until_sample(bound["metrics"], "kvferry_picker_open_requests", 0.0)


async def test_endpoints_that_are_gone_get_nothing_while_others_are_there(tmp_path):
    servers = [ModelServer(), ModelServer()]
    async with AsyncExitStack() as stack:
        gone = await stack.enter_async_context(AsyncExitStack())
        await gone.enter_async_context(model_servers(servers[0]))
        await stack.enter_async_context(model_servers(servers[1]))
        flags = [flag for server in servers for flag in ("--endpoints", server.address)]
        picker = stack.enter_context(running(*FLAGS, "--stale-seconds", "0.1", *flags))
        bound = await listening(picker)
        http = await gateway(stack, bound["grpc"], tmp_path, EnvoyMode())
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        await gone.aclose()
        await until_sample(bound["metrics"], 'kvferry_picker_endpoints{trust="lost"}', 1.0)
        for number in range(8):
            answer = await http.post("/v1/completions", json={"prompt": str(number)})
            assert answer.json()["served_by"] == servers[1].address


async def test_an_endpoint_whose_metrics_hang_holds_up_no_other(tmp_path):
    servers = [ModelServer(metrics_gate=asyncio.Event()), ModelServer(), ModelServer()]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(model_servers(*servers))
        flags = [flag for server in servers for flag in ("--endpoints", server.address)]
        picker = stack.enter_context(running(*FLAGS, *flags))
        bound = await listening(picker)
        await until_sample(bound["metrics"], 'kvferry_picker_scrapes_total{outcome="failed"}', 1.0)
        assert await sample(bound["metrics"], 'kvferry_picker_endpoints{trust="fresh"}') == 2
        assert await sample(bound["metrics"], 'kvferry_picker_endpoints{trust="lost"}') == 1
        assert min(server.scrapes for server in servers[1:]) > 5


async def test_a_picker_that_was_stopped_for_a_while_goes_on(tmp_path):
    server = ModelServer()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(model_servers(server))
        picker = stack.enter_context(running(*FLAGS, "--endpoints", server.address))
        http = await gateway(stack, (await listening(picker))["grpc"], tmp_path, EnvoyMode())
        picker.process.send_signal(signal.SIGSTOP)
        waiting = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        await eventually(lambda: not waiting.done(), SECONDS)
        picker.process.send_signal(signal.SIGCONT)
        assert (await waiting).status_code == 200


async def test_connections_that_send_nothing_do_not_keep_others_out():
    server = ModelServer()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(model_servers(server))
        picker = stack.enter_context(running(*FLAGS, "--endpoints", server.address))
        bound = await listening(picker)
        host, _, port = bound["grpc"].rpartition(":")
        for _ in range(200):
            _, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
        stub = await stack.enter_async_context(picker_stub(bound["grpc"]))
        idle = [stub.open() for _ in range(200)]
        for call in idle:
            await call.write(head_message())
        call = stub.open()
        await call.write(head_message(is_end=True))
        assert destination(await read(call)) == server.address
        for one in (*idle, call):
            one.cancel()
