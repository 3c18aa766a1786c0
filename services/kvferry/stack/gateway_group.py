"""Runs a gateway of several processes on this machine: starts them, restarts any that exit, and drains them."""

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence

from kvferry.core.addresses import join_address, listen_address
from kvferry.core.clock import Clock
from kvferry.core.errors import cannot_listen
from kvferry.core.process.stop_signals import stop_signals
from kvferry.core.settings.resolve import Resolved
from kvferry.stack.plan.gateway_processes import SharedAddresses, admin_address, gateway_process_specs
from kvferry.stack.supervisor import SupervisedProcess

_LISTEN_SECONDS = 120.0
_STOP_SECONDS = 10.0
"""Time allowed for a process to exit after it has drained."""


class GatewayGroup:
    """The processes of a gateway. `stop` must be awaited even if `start` fails."""

    def __init__(
        self,
        settings: Mapping[str, Resolved],
        *,
        clock: Clock,
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            settings: resolved settings of `kvferry gateway`.
            clock: clock of the supervision.
            on_death: see `SupervisedProcess`.
        """
        self._settings = settings
        self._clock = clock
        self._on_death = on_death
        self._reserved: list[socket.socket] = []
        self.processes: list[SupervisedProcess] = []

    async def start(self) -> tuple[SharedAddresses, Sequence[str]]:
        """Start all processes; when all listen, return the addresses for clients and each process's admin address.

        Raises:
            UsageError: an address is invalid or in use.
            Unavailable: a process does not listen in time.
        """
        shared = SharedAddresses(self._reserve("http"), self._reserve("grpc"))
        count = int(str(self._value("processes")))
        for number, spec in enumerate(gateway_process_specs(self._settings, shared, count)):
            process = SupervisedProcess(spec, clock=self._clock, on_death=self._on_death)
            process.prefer({"admin": admin_address(str(self._value("admin")), number)})
            self.processes.append(process)
        for process in self.processes:
            process.start()
        events = await asyncio.gather(*(process.wait_listening(_LISTEN_SECONDS) for process in self.processes))
        return shared, [str(event["admin"]) for event in events]

    async def stop(self) -> None:
        """Drain all processes, and wait until they exit. Idempotent."""
        seconds = float(str(self._value("linger_seconds"))) + float(str(self._value("drain_seconds"))) + _STOP_SECONDS
        await asyncio.gather(*(process.stop(seconds) for process in self.processes))
        for held in self._reserved:
            held.close()
        self._reserved.clear()

    def _value(self, name: str) -> object:
        return self._settings[name].value

    def _reserve(self, name: str) -> str:
        """Bind an address without listening, so that the group keeps its port while processes restart."""
        address = str(self._value(name))
        host, port = listen_address(address, name)
        held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._reserved.append(held)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind((host, port))
        except OSError as error:
            raise cannot_listen(name, address, error) from error
        return join_address(host, held.getsockname()[1])


async def run_gateway_group(
    settings: Mapping[str, Resolved],
    *,
    clock: Clock,
    announce: Callable[[Mapping[str, object]], None],
    on_death: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT, then drain all processes; a second signal has its default effect.

    Args:
        settings: resolved settings of `kvferry gateway`.
        clock: clock of the supervision.
        announce: called with the event `listening` when all processes listen.
        on_death: see `SupervisedProcess`.

    Raises:
        UsageError, Unavailable: see `GatewayGroup.start`.
    """
    stop = asyncio.Event()
    group = GatewayGroup(settings, clock=clock, on_death=on_death)
    with stop_signals(asyncio.get_running_loop(), stop.set):
        try:
            starting, stopping = asyncio.create_task(group.start()), asyncio.create_task(stop.wait())
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                shared, admins = starting.result()
                addresses = {"http": shared.http, "grpc": shared.grpc, "admin": admins[0], "admins": list(admins)}
                announce({"event": "listening", **addresses})
            await stopping
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        finally:
            await group.stop()
