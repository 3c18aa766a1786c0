"""Liveness, readiness and metrics of the operator on one small HTTP port."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvferry.core.errors import UsageError


class HealthServer:
    """HTTP server of `/healthz`, `/readyz` and `/metrics`."""

    def __init__(self, runner: web.AppRunner, port: int) -> None:
        self._runner = runner
        self.port = port

    @classmethod
    async def start(cls, address: str, unhealthy: Callable[[], str], registry: CollectorRegistry) -> "HealthServer":
        """Bind the address and start to serve.

        Args:
            address: `host:port`; port 0 selects a free port.
            unhealthy: returns the reason why liveness fails, or an empty string.
            registry: metrics for `/metrics`.

        Raises:
            UsageError: the address cannot be bound.
        """

        async def healthz(_: web.Request) -> web.Response:
            why = unhealthy()
            return web.Response(status=503 if why else 200, text=f"{why or 'ok'}\n")

        async def readyz(_: web.Request) -> web.Response:
            return web.Response(text="ok\n")

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

        app = web.Application()
        app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        host, _, port = address.rpartition(":")
        try:
            site = web.TCPSite(runner, host.strip("[]"), int(port))
            await site.start()
        except (OSError, ValueError) as error:
            await runner.cleanup()
            raise UsageError(f"cannot listen on {address}: {error}", field="health") from error
        return cls(runner, runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop serving and close the port."""
        await self._runner.cleanup()
