"""Checks that an engine, or running workers, have no resources of requests in use."""

import threading
from collections.abc import Iterable

from harness.servers.worker_channel import worker_channel
from kvferry.core.clock import SystemClock
from kvferry.engine.engine import Engine
from kvferry.rpc.tls.pool_tls import PoolTls
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
    """Check the engine's invariants, and that it has no sequences, exports or transfers and all pages are free or
    pinned."""
    engine.check_integrity()
    assert engine.is_idle, f"the engine still holds resources: {engine.load()}"


def leftovers(load: worker_admin_pb2.WorkerLoad) -> dict[str, int]:
    """Return the number of each resource in use by a worker, by name; empty if the worker is idle."""
    held = {name: getattr(load, name) for name in HELD if getattr(load, name)}
    if load.blocks_free + load.blocks_pinned != load.blocks_total:
        held["blocks"] = load.blocks_total - load.blocks_free - load.blocks_pinned
    return held


def _load(stub: "worker_admin_pb2_grpc.WorkerAdminStub") -> worker_admin_pb2.WorkerLoad:
    # Wait for a worker that is restarting.
    return stub.Status(worker_admin_pb2.StatusRequest(), timeout=30, wait_for_ready=True).load


def assert_workers_idle(
    admin_addresses: Iterable[str], *, within_seconds: float = 20.0, tls: PoolTls | None = None
) -> None:
    """Check that every worker becomes idle in time: no blocks, leases, tickets, transfers or calls.

    Releases are sent after a stream has ended, so this polls for up to `within_seconds`.

    Args:
        tls: TLS of the test's pool; `None` for plain connections.
    """
    clock, pause = SystemClock(), threading.Event()
    deadline = clock.monotonic() + within_seconds
    for address in admin_addresses:
        with worker_channel(address, tls) as channel:
            stub = worker_admin_pb2_grpc.WorkerAdminStub(channel)
            while held := leftovers(_load(stub)):
                assert clock.monotonic() < deadline, f"worker {address} still holds {held}"
                pause.wait(_POLL_SECONDS)
