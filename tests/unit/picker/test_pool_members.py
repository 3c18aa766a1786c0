"""Endpoints that follow an API server: a real HTTP server with the answers of one."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import urllib3
from aiohttp import web
from harness.waiting import eventually

from kvferry.core.clock import SystemClock
from kvferry.gateway.decide.config import PoolName
from kvferry.picker.config import PickerConfig
from kvferry.picker.decide.endpoints import EndpointStates
from kvferry.picker.pool_members import PoolMembers, PoolPodsApi

SECONDS = 20.0
POOL = {
    "spec": {"selector": {"matchLabels": {"app": "llama"}}, "targetPorts": [{"number": 8000}]},
}


def pod(name: str, host: str) -> dict[str, Any]:
    status = {"podIP": host, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": name, "resourceVersion": "2"}, "status": status}


class ApiServer:
    """Answers for one pool, and sends the events of a watch."""

    def __init__(self) -> None:
        self.pool: Any = POOL
        self.pods = [pod("a", "10.0.0.1")]
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.paths: list[str] = []
        self.url = ""

    async def get_pool(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        return web.json_response(self.pool, status=200 if self.pool else 404)

    async def get_pods(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path_qs)
        assert request.query["labelSelector"] == "app=llama"
        if "watch" not in request.query:
            return web.json_response({"items": self.pods, "metadata": {"resourceVersion": "1"}})
        answer = web.StreamResponse()
        await answer.prepare(request)
        while (event := await self.events.get()) is not None:
            await answer.write(json.dumps(event).encode() + b"\n")
        return answer


@asynccontextmanager
async def followed(server: ApiServer) -> AsyncIterator[EndpointStates]:
    app = web.Application()
    app.router.add_get("/apis/inference.networking.k8s.io/v1/namespaces/chat/inferencepools/llama", server.get_pool)
    app.router.add_get("/api/v1/namespaces/chat/pods", server.get_pods)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    configuration = SimpleNamespace(host=url, auth_settings=dict)
    client = SimpleNamespace(
        configuration=configuration, rest_client=SimpleNamespace(pool_manager=urllib3.PoolManager())
    )
    clock = SystemClock()
    states = EndpointStates(clock, scrape_seconds=60, stale_seconds=60)
    name = PoolName("chat", "llama")
    members = PoolMembers(PickerConfig(pool=name), states, clock, PoolPodsApi(name, client))
    members.connect()
    running = asyncio.create_task(members.run())
    try:
        yield states
    finally:
        running.cancel()
        await asyncio.wait((running,))
        members.close()
        await server.events.put(None)
        await runner.cleanup()


async def test_endpoints_follow_the_pods_of_the_pool():
    server = ApiServer()
    async with followed(server) as states:
        await eventually(lambda: list(states.by_address) == ["10.0.0.1:8000"], SECONDS)
        await server.events.put({"type": "ADDED", "object": pod("b", "10.0.0.2")})
        await eventually(lambda: len(states.by_address) == 2, SECONDS)
        await server.events.put({"type": "DELETED", "object": pod("a", "10.0.0.1")})
        await eventually(lambda: list(states.by_address) == ["10.0.0.2:8000"], SECONDS)


async def test_a_pool_that_does_not_exist_yet_is_read_again(caplog):
    server = ApiServer()
    server.pool = None
    async with followed(server) as states:
        await eventually(lambda: "status 404" in caplog.text, SECONDS)
        assert not states.by_address
        server.pool = POOL
        await eventually(lambda: list(states.by_address) == ["10.0.0.1:8000"], SECONDS)


async def test_a_pool_that_is_broken_keeps_the_last_endpoints():
    server = ApiServer()
    async with followed(server) as states:
        await eventually(lambda: bool(states.by_address), SECONDS)
        server.pool = {"spec": {}}
        gone = {"type": "ERROR", "object": {"code": 410, "message": "too old"}}
        await server.events.put(gone)
        count = len(server.paths)
        await eventually(lambda: len(server.paths) > count, SECONDS)
        assert list(states.by_address) == ["10.0.0.1:8000"]
