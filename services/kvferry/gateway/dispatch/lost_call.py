"""Converts the error of a failed call to a worker, and distinguishes it from a cancelled request."""

import asyncio
from typing import Any

import grpc

from kvferry.core.errors import STEP_FAILED, GenerationFailed, KvferryError, Unavailable
from kvferry.gateway.fleet.member import Hold
from kvferry.rpc.call_interceptor import STARTED_METADATA
from kvferry.rpc.errors import DETAILS_KEY, error_from_rpc


class WorkerLost(Exception):
    """A call to a worker failed; `retry_decision` decides how the sample continues."""

    def __init__(self, error: KvferryError, address: str | None, *, in_failed_step: bool = False) -> None:
        super().__init__(error.message)
        self.error = error
        self.address = address
        """`host:port` of the lost worker; `None` if no worker was available."""
        self.in_failed_step = in_failed_step
        """Whether the worker failed while processing this request, so that the request may be the cause."""


async def worker_lost(call: grpc.aio.Call, error: grpc.aio.AioRpcError, address: str) -> WorkerLost:
    """Convert the error of a failed call to a `WorkerLost`.

    A worker reports a failed step. If its process exited, the connection breaks without a report, and the call's
    initial metadata shows whether the request had been started.

    Args:
        call: the failed call.
        error: its error.
        address: address of the worker.
    """
    known = error_from_rpc(error)
    in_failed_step = known.reason in (STEP_FAILED, GenerationFailed.reason)
    if error.code() is grpc.StatusCode.UNAVAILABLE and not _has_details(error):
        received: Any = await call.initial_metadata()  # complete, since the call has ended
        in_failed_step = any(pair in STARTED_METADATA for pair in received or ())
    return WorkerLost(known, address, in_failed_step=in_failed_step)


def _has_details(error: grpc.aio.AioRpcError) -> bool:
    return any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ())


def raise_if_lost(held: Hold, address: str) -> None:
    """Raise `WorkerLost` if the fleet cancelled the call, else return. To be called on CancelledError, which grpc
    raises both for a cancelled call and for a cancelled task.

    Args:
        held: hold of the call, which the fleet marks when it cancels the call.
        address: address of the worker.

    Raises:
        WorkerLost: the fleet cancelled the call.
    """
    task = asyncio.current_task()
    if held.why_lost and (task is None or not task.cancelling()):
        raise WorkerLost(Unavailable(f"worker {address} {held.why_lost}"), address)
