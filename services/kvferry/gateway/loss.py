"""A call to a worker that failed, told apart from a request that was cancelled."""

import asyncio

from kvferry.core.errors import KvferryError, Unavailable
from kvferry.gateway.member import Hold


class Lost(Exception):
    """A call to a worker failed; what that means is still to be judged."""

    def __init__(self, error: KvferryError, address: str | None) -> None:
        super().__init__(error.message)
        self.error = error
        self.address = address
        """`None`: there was no worker to call."""


def raise_if_lost(held: Hold, address: str) -> None:
    """To be called on CancelledError, which grpc raises both when the fleet gave up the call and when the task that
    awaits it is cancelled.

    Raises:
        Lost: the fleet gave up the call.
    """
    task = asyncio.current_task()
    if held.why_lost and (task is None or not task.cancelling()):
        raise Lost(Unavailable(f"worker {address} {held.why_lost}"), address)
