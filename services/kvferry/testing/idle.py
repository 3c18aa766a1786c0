"""`assert_idle`: nothing that a request held is left, in an engine or in running workers."""

import threading
from collections.abc import Iterable

import grpc

from kvferry.core.clock import SystemClock
from kvferry.engine.engine import Engine
from kvferry.v1 import worker_admin_pb2, worker_admin_pb2_grpc

_POLL_SECONDS = 0.02

HELD = (
    "running",
    "waiting",
    "loading",
    "blocks_quarantined",
    "tickets_offered",
    "tickets_claimed",
    "transfers",
    "open_calls",
    "stores",
)


def assert_idle(engine: Engine) -> None:
    """No sequence, export, transfer; every page free; every law holds."""
    engine.check_integrity()
    assert engine.is_idle, f"something is left: {engine.load()}"


def leftovers(load: worker_admin_pb2.WorkerLoad) -> dict[str, int]:
    """What a worker still holds, by name; empty when idle."""
    held = {name: getattr(load, name) for name in HELD if getattr(load, name)}
    if load.blocks_free != load.blocks_total:
        held["blocks"] = load.blocks_total - load.blocks_free
    return held


def _load(stub: "worker_admin_pb2_grpc.WorkerAdminStub") -> worker_admin_pb2.WorkerLoad:
    # A worker that is being restarted is waited for.
    return stub.Status(worker_admin_pb2.StatusRequest(), timeout=30, wait_for_ready=True).load


def assert_workers_idle(admin_addresses: Iterable[str], *, within_seconds: float = 20.0) -> None:
    """Every worker gives everything back within the time: blocks, leases, tickets, transfers, calls.

    Releases travel after a stream has ended, so this looks until nothing is left; it never waits longer than told.
    """
    clock, pause = SystemClock(), threading.Event()
    deadline = clock.monotonic() + within_seconds
    for address in admin_addresses:
        with grpc.insecure_channel(address) as channel:
            stub = worker_admin_pb2_grpc.WorkerAdminStub(channel)
            while held := leftovers(_load(stub)):
                assert clock.monotonic() < deadline, f"worker {address} still holds {held}"
                pause.wait(_POLL_SECONDS)
