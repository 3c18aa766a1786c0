"""Plans a gateway of several processes, which share the ports for clients. Pure.

| item | each process |
| --- | --- |
| HTTP and gRPC ports | the same: the kernel gives each new connection to one of the processes (SO_REUSEPORT) |
| admin port | its own: the first process has the configured port, others the next; 0 selects a free port for each |
| streams, queue | a share of the limits, so that the sum stays within them |
| request trace | its own file (FILE.0, FILE.1, ..) and a share of the size |
| cache map, journal, quotas | its own, exact; a tenant's quota applies to each process |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.core.errors import UsageError
from kvferry.core.settings.resolve import Resolved
from kvferry.stack.plan.processes import ProcessSpec

_SHARED = ("max_streams", "max_queued", "max_queued_bytes", "max_held", "trace_file_bytes")
"""Limits that are divided among the processes."""
_OWN = frozenset({"processes", "share_ports", "http", "grpc", "admin"})
_FILE = "trace_file"
"""Setting of a file; each process writes a file of its own."""
_STATE = "state"
"""Setting of a URL that may have a password."""


@dataclass(frozen=True, slots=True)
class SharedAddresses:
    """The addresses that all processes listen on, `host:port` with the real port."""

    http: str
    grpc: str


def admin_address(address: str, number: int) -> str:
    """Return the admin address of process `number`, from 0.

    Args:
        address: admin address of the first process, `host:port`.
        number: number of the process, from 0.

    Raises:
        UsageError: there is no port for it.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) <= 0xFFFF or (int(port) and int(port) + number > 0xFFFF):
        raise UsageError(
            f"admin {address!r} leaves no port for process {number}; use a lower port in host:port", field="admin"
        )
    return f"{host}:{int(port) + number if int(port) else 0}"


def gateway_process_specs(
    settings: Mapping[str, Resolved], shared: SharedAddresses, processes: int
) -> Sequence[ProcessSpec]:
    """Return the specs of the processes, with the group's settings.

    Args:
        settings: resolved settings of the group by name.
        shared: addresses that clients connect to.
        processes: number of processes.
    """
    flags: list[str] = []
    environment: dict[str, str] = {}
    trace_flag, trace_file = "", ""
    for name, found in settings.items():
        setting = found.setting
        if name == _FILE and found.value:
            trace_flag, trace_file = setting.flag, _literal(str(found.value))
            continue
        if name in _OWN or (found.source == "default" and name not in _SHARED):
            continue
        if setting.is_secret or name == _STATE:  # not as a flag, which other users can read
            environment[setting.variable] = str(found.value)
            continue
        values: Sequence[Any] = found.value if setting.is_repeated else [found.value]
        for value in values:
            text = str(-(-int(value) // processes) if name in _SHARED else value)
            flags += [setting.flag, _literal(text)]
    fixed = ("--http", shared.http, "--grpc", shared.grpc, "--share-ports", "true")

    def traced(number: int) -> tuple[str, ...]:
        return (trace_flag, f"{trace_file}.{number}") if trace_flag else ()

    return [
        # A restarted process reuses the admin address of its first start, so that it can be found where it was.
        ProcessSpec(
            f"gateway-{number}", ("gateway", *flags, *traced(number), *fixed, "--admin", "{admin}"), environment
        )
        for number in range(processes)
    ]


def _literal(text: str) -> str:
    """Return a value without placeholders for addresses."""
    return text.replace("{", "{{").replace("}", "}}")
