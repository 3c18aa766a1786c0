"""Runs a stack on this machine: starts workers and gateway, generates a first token, and stops all in order."""

import asyncio
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvferry.client import AsyncClient
from kvferry.core.addresses import listen_address
from kvferry.core.clock import Clock
from kvferry.core.errors import KvferryError, Unavailable, UsageError, cannot_listen
from kvferry.core.process.config import lasting_secret
from kvferry.core.sampling import SamplingParams
from kvferry.rpc.access.call_keys import role_key
from kvferry.rpc.access.table import CallerRole
from kvferry.rpc.health import wait_serving
from kvferry.rpc.tls.certificate_files import CertificateFiles
from kvferry.rpc.tls.written_files import write_pool
from kvferry.stack.plan.processes import StackConfig, gateway_spec, worker_specs
from kvferry.stack.private_folder import PrivateFolder
from kvferry.stack.supervisor import SupervisedProcess

_LISTEN_SECONDS = 120.0
_READY_SECONDS = 180.0
_FIRST_TOKEN_SECONDS = 60.0
_TLS_DAYS = 3650
"""Validity of a run's certificates in days; longer than any run, since they are not renewed."""


@dataclass(frozen=True, slots=True)
class StackAddresses:
    """Addresses of the stack's gateway, each `host:port`."""

    http: str
    grpc: str
    admin: str


def check_all_free(addresses: Mapping[str, str]) -> None:
    """Check that all addresses can be bound now.

    Args:
        addresses: `host:port` by name of the flag.

    Raises:
        UsageError: an address is invalid or in use; the message has a line for each of them.
    """
    found: list[UsageError] = []
    for name, address in addresses.items():
        try:
            check_free(name, address)
        except UsageError as error:
            found.append(error)
    if found:
        raise UsageError("\n".join(error.message for error in found), field=found[0].field)


def check_free(name: str, address: str) -> None:
    """Check that an address can be bound now; port 0 always can.

    Args:
        name: name of the flag, for error messages.
        address: `host:port`.

    Raises:
        UsageError: the address is invalid or in use.
    """
    host, port = listen_address(address, name)
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise cannot_listen(name, address, error) from error


class LocalStack:
    """The processes of a stack. `stop` must be awaited even if `start` fails."""

    def __init__(
        self,
        config: StackConfig,
        *,
        clock: Clock,
        on_progress: Callable[[str], None] | None = None,
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            config: configuration of the stack.
            clock: clock of the supervision.
            on_progress: called with a line of text at each stage of the start.
            on_death: see `SupervisedProcess`.
        """
        self._config = config
        self._clock = clock
        self._say = on_progress or (lambda _: None)
        self._on_death = on_death
        self._tls_folder: PrivateFolder | None = None
        self.workers: list[SupervisedProcess] = []
        self.worker_admin: dict[str, str] = {}
        """`host:port` of WorkerAdmin by worker name; a split worker has two names."""
        self.gateway: SupervisedProcess | None = None
        self.dtype = ""
        """Compute data type of the workers; set when they are ready."""

    async def start(self) -> StackAddresses:
        """Start all processes; return after a first token has been generated through the gateway.

        Raises:
            Unavailable: a process did not start in time; processes already started keep running until `stop`.
        """
        # Before any process is started.
        check_all_free({"http": self._config.http, "grpc": self._config.grpc, "admin": self._config.admin})
        if self._config.pool_tls:
            self._draw_certificates()
        # Persistent tiers require the same tenant key in every run, otherwise block names differ.
        outlives = any(not url.startswith("dram:") for url in self._config.tiers)
        tenant_key = lasting_secret("tenant.key") if outlives else secrets.token_hex(32)
        ticket_key = self._config.ticket_key or secrets.token_hex(32)
        gateway_key = role_key(ticket_key.encode(), CallerRole.GATEWAY).hex()
        keys = {"KVFERRY_TICKET_KEY": ticket_key, "KVFERRY_TENANT_KEY": tenant_key}
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
        gateway_keys = {"KVFERRY_GATEWAY_KEY": gateway_key, "KVFERRY_TENANT_KEY": tenant_key}
        if self._config.probe_key:
            gateway_keys["KVFERRY_PROBE_KEY"] = self._config.probe_key
        spec = gateway_spec(self._config, located, gateway_keys)
        self.gateway = SupervisedProcess(spec, clock=self._clock, on_death=self._on_death)
        # The first start binds the configured addresses; restarts reuse the addresses that were bound.
        self.gateway.prefer({"http": self._config.http, "grpc": self._config.grpc, "admin": self._config.admin})
        self.gateway.start()
        event = await self.gateway.wait_listening(_LISTEN_SECONDS)
        self._say("loading the model")
        ready = await asyncio.gather(*(w.wait_ready(_READY_SECONDS) for w in self.workers))
        self.dtype = str(ready[0]["dtype"])
        addresses = StackAddresses(str(event["http"]), str(event["grpc"]), str(event["admin"]))
        self._say("first token")
        await self._first_token(addresses.grpc)
        return addresses

    async def stop(self, grace_seconds: float) -> None:
        """Stop the gateway first, so that running streams can finish, then the workers. Idempotent."""
        if self.gateway is not None:
            await self.gateway.stop(grace_seconds)
        await asyncio.gather(*(worker.stop(grace_seconds) for worker in self.workers))
        if self._tls_folder is not None:
            self._tls_folder.remove()

    def _draw_certificates(self) -> None:
        """Write the certificates of this run to a temporary folder that only this user can read."""
        self._tls_folder = PrivateFolder("kvferry-tls-")
        found = write_pool(self._tls_folder.path, self._clock.wall(), _TLS_DAYS)
        config = self._config
        self._config = replace(
            config,
            worker_flags=(*config.worker_flags, *_tls_flags(found["worker"])),
            gateway_flags=(*config.gateway_flags, *_tls_flags(found["gateway"])),
        )

    async def _first_token(self, address: str) -> None:
        """Generate a token through gateway, prefill, hand-off and decode; this also opens all connections."""
        await wait_serving(address, _FIRST_TOKEN_SECONDS)
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        async with AsyncClient(address, api_key=self._config.api_key) as client:
            try:
                await client.complete("Hello", sampling, timeout=_FIRST_TOKEN_SECONDS)
            except KvferryError as error:
                raise Unavailable(f"the stack did not generate a first token: {error.message}") from error


def _tls_flags(files: CertificateFiles) -> tuple[str, ...]:
    flags = {"cert": files.chain, "key": files.key, "ca": files.ca}
    return tuple(part for name, path in flags.items() for part in (f"--pool-tls-{name}-file", str(path)))
