"""A stack on this machine: workers, then the gateway, then a first token; and everything down again in order."""

import asyncio
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.client import AsyncClient
from kvferry.core.clock import Clock
from kvferry.core.config import lasting_secret
from kvferry.core.errors import KvferryError, Unavailable, UsageError
from kvferry.core.sampling import SamplingParams
from kvferry.rpc.health import wait_serving
from kvferry.stack.layout import StackConfig, gateway_spec, worker_specs
from kvferry.stack.supervisor import SupervisedProcess

_LISTEN_SECONDS = 120.0
_READY_SECONDS = 180.0
_FIRST_TOKEN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class StackAddresses:
    """Where the gateway listens."""

    http: str
    grpc: str


def check_free(name: str, address: str) -> None:
    """Whether an address can be bound now; port 0 always can.

    Raises:
        UsageError: it is no address, or taken.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise UsageError(f"{address!r} is not an address; write host:port, port 0 for any free one", field=name)
    bare = host.strip("[]")
    try:
        socket.create_server((bare, int(port)), family=socket.AF_INET6 if ":" in bare else socket.AF_INET).close()
    except OSError as error:
        raise UsageError(f"cannot listen on {address} (--{name}): {error.strerror}", field=name) from error


class LocalStack:
    """Owns the processes from `start` to `stop`; `stop` must be awaited in every case."""

    def __init__(
        self,
        config: StackConfig,
        *,
        clock: Clock,
        on_progress: Callable[[str], None] | None = None,
        on_death: Callable[[str, int, float], None] | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._say = on_progress or (lambda _: None)
        self._on_death = on_death
        self.workers: list[SupervisedProcess] = []
        self.worker_admin: dict[str, str] = {}
        """`host:port` of WorkerAdmin by worker name; a split worker has two names."""
        self.gateway: SupervisedProcess | None = None
        self.dtype = ""
        """Compute type of the workers; known when they are ready."""

    async def start(self) -> StackAddresses:
        """Start everything; return when a first token has come through it.

        Raises:
            Unavailable: something did not start in time; what did is still running, `stop` ends it.
        """
        for name, address in (("http", self._config.http), ("grpc", self._config.grpc)):
            check_free(name, address)  # before anything is started that would have to be stopped again
        # What outlives this stack in a tier is found again only under the same names.
        outlives = any(not url.startswith("dram:") for url in self._config.tiers)
        tenant_key = lasting_secret("tenant.key") if outlives else secrets.token_hex(32)
        keys = {"KVFERRY_TICKET_KEY": secrets.token_hex(32), "KVFERRY_TENANT_KEY": tenant_key}
        specs = worker_specs(self._config, keys)
        self.workers = [SupervisedProcess(s, clock=self._clock, on_death=self._on_death) for s in specs]
        self._say(f"starting {len(self.workers)} workers")
        for worker in self.workers:
            worker.start()
        events = await asyncio.gather(*(w.wait_listening(_LISTEN_SECONDS) for w in self.workers))
        for spec, event in zip(specs, events, strict=True):
            self.worker_admin[spec.name] = str(event["admin"])
            if "decode_admin" in event:
                self.worker_admin[f"{spec.name}-decode"] = str(event["decode_admin"])
        self._say("starting the gateway")
        located = list(zip(specs, events, strict=True))
        spec = gateway_spec(self._config, located, keys)
        self.gateway = SupervisedProcess(spec, clock=self._clock, on_death=self._on_death)
        # The first start binds what the user asked for; the supervisor repeats what was really bound.
        self.gateway.prefer({"http": self._config.http, "grpc": self._config.grpc})
        self.gateway.start()
        event = await self.gateway.wait_listening(_LISTEN_SECONDS)
        self._say("loading the model")
        ready = await asyncio.gather(*(w.wait_ready(_READY_SECONDS) for w in self.workers))
        self.dtype = str(ready[0]["dtype"])
        addresses = StackAddresses(str(event["http"]), str(event["grpc"]))
        self._say("first token")
        await self._first_token(addresses.grpc)
        return addresses

    async def stop(self, grace_seconds: float) -> None:
        """Gateway first, so that running streams can end on their workers; then the workers. Idempotent."""
        if self.gateway is not None:
            await self.gateway.stop(grace_seconds)
        await asyncio.gather(*(worker.stop(grace_seconds) for worker in self.workers))

    async def _first_token(self, address: str) -> None:
        """One token through gateway, prefill, hand-off and decode. Opens every connection on the way, too."""
        await wait_serving(address, _FIRST_TOKEN_SECONDS)
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        async with AsyncClient(address) as client:
            try:
                await client.complete("Hello", sampling, timeout=_FIRST_TOKEN_SECONDS)
            except KvferryError as error:
                raise Unavailable(f"no first token came through the stack: {error.message}") from error
