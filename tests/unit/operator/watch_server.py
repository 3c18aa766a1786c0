"""An API server over HTTP for kopf: discovery, lists and watches of the watched kinds, without changes of its own."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from kvferry.operator.process.watches import WATCHED

_VERBS = ["get", "list", "watch", "patch"]


class WatchServer:
    """Objects by kind; each watch is silent until `end_watches` reports that its resource version is too old."""

    def __init__(self) -> None:
        self.objects: dict[str, list[dict[str, Any]]] = {kind: [] for kind in WATCHED}
        self.num_watches = 0
        """Number of watches that were opened so far."""
        self.opened = asyncio.Condition()
        self._gap = asyncio.Event()
        self.authorization = ""
        self.configuration = SimpleNamespace(host="", ssl_ca_cert=None, verify_ssl=False, cert_file=None, key_file=None)

    def list(
        self, api_version: str, kind: str, namespace: str | None, labels: Mapping[str, str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Return the objects of a kind, as the operator's own client does."""
        yield from list(self.objects[kind])

    async def end_watches(self) -> None:
        """End all watches with 410 Gone."""
        self._gap.set()
        self._gap = asyncio.Event()

    async def wait_for_watches(self, count: int) -> None:
        """Wait until `count` watches were opened."""
        async with self.opened:
            await self.opened.wait_for(lambda: self.num_watches >= count)

    async def _find(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        if parts == ["version"]:
            return web.json_response({"major": "1", "minor": "33"})
        if parts == ["api"]:
            return web.json_response({"versions": ["v1"]})
        groups = {group: version for group, version, _ in WATCHED.values() if group}
        if parts == ["apis"]:
            found = [
                {"name": group, "versions": [{"version": version}], "preferredVersion": {"version": version}}
                for group, version in groups.items()
            ]
            return web.json_response({"groups": found})
        group = parts[1] if parts[0] == "apis" else ""
        rest = parts[3:] if group else parts[2:]
        kinds = {plural: kind for kind, (owner, _, plural) in WATCHED.items() if owner == group}
        if not rest:
            if not group:
                kinds["namespaces"] = "Namespace"  # kopf waits until this kind is served
            named = [
                {"name": plural, "kind": kind, "singularName": "", "namespaced": kind != "Namespace", "verbs": _VERBS}
                for plural, kind in kinds.items()
            ]
            return web.json_response({"resources": named})
        kind = kinds[rest[-1]]
        if request.query.get("watch") != "true":
            return web.json_response({"items": self.objects[kind], "metadata": {"resourceVersion": "1"}})
        return await self._watch(request)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response, gap = web.StreamResponse(), self._gap
        await response.prepare(request)
        async with self.opened:
            self.num_watches += 1
            self.opened.notify_all()
        await gap.wait()
        await response.write(b'{"type": "ERROR", "object": {"code": 410}}\n')
        return response


@asynccontextmanager
async def watch_server() -> AsyncIterator[WatchServer]:
    """Yield a server without objects on a free port."""
    server = WatchServer()
    app = web.Application()
    app.router.add_get("/{path:.*}", server._find)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.configuration.host = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await server.end_watches()
        await runner.cleanup()
