"""Stand-ins of model servers for tests: real HTTP servers with the metrics and the OpenAI routes of vLLM and SGLang."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

_PAGES: dict[str, Callable[["ModelServer"], str]] = {
    "vllm": lambda server: (
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        "# TYPE vllm:num_requests_running gauge\n"
        f'vllm:num_requests_running{{engine="0",model_name="m"}} {server.running}\n'
        f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {server.waiting}\n'
        f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {server.usage}\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="4096",engine="0"} 1.0\n'
        f'vllm:prompt_tokens_total{{engine="0",model_name="m"}} {server.scrapes}\n'
    ),
    "sglang": lambda server: (
        f'sglang:num_running_reqs{{model_name="m"}} {server.running}\n'
        f'sglang:num_queue_reqs{{model_name="m"}} {server.waiting}\n'
        f'sglang:token_usage{{model_name="m"}} {server.usage}\n'
        f'sglang:prompt_tokens_total{{model_name="m"}} {server.scrapes}\n'
    ),
    "none": lambda server: "process_cpu_seconds_total 1\n",
}


@dataclass(slots=True)
class ModelServer:
    """One server: what it reports, and the requests that it got."""

    flavor: str = "vllm"
    running: float = 0
    waiting: float = 0
    usage: float = 0.0
    scrapes: int = 0
    page: str | None = None
    """Metrics in place of those of the flavor."""
    status: int = 200
    address: str = ""
    requests: list[web.BaseRequest] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    gate: asyncio.Event | None = None
    """Responses wait for it after their first part, if there is one."""
    cancelled: int = 0
    metrics_gate: asyncio.Event | None = None
    """Scrapes wait for it, if there is one."""

    async def metrics(self, request: web.Request) -> web.Response:
        """Answer a scrape."""
        del request
        self.scrapes += 1
        if self.metrics_gate is not None:
            await self.metrics_gate.wait()
        return web.Response(text=self.page if self.page is not None else _PAGES[self.flavor](self))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer any other route: by its address, and by events if the body asks for a stream."""
        body = await request.read()
        self.requests.append(request)
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "broken"}}, status=self.status)
        headers = {"x-served-by": self.address}
        if b'"stream": true' not in body and b'"stream":true' not in body:
            found: dict[str, Any] = {"served_by": self.address, "bytes": len(body)}
            return web.json_response(found, headers=headers)
        answer = web.StreamResponse(headers={**headers, "content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b'data: {"token": 1}\n\n')
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        await answer.write(b'data: {"token": 2}\n\ndata: [DONE]\n\n')
        await answer.write_eof()
        return answer

    def json_bodies(self) -> Sequence[Any]:
        """Return the bodies that it got."""
        return [json.loads(body) for body in self.bodies]


@asynccontextmanager
async def model_servers(*servers: ModelServer) -> AsyncIterator[None]:
    """Run servers on free ports of 127.0.0.1."""
    async with AsyncExitStack() as stack:
        for server in servers:
            app = web.Application(client_max_size=64 << 20)
            app.router.add_get("/metrics", server.metrics)
            app.router.add_route("*", "/{path:.*}", server.complete)
            # A client that disconnects cancels its request, as in vLLM.
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", int(server.address.rpartition(":")[2] or 0))
            await site.start()
            host, port = runner.addresses[0][:2]
            server.address = f"{host}:{port}"
        yield
