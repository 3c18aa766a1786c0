"""Where requests wait for a pool's first worker; whoever sits down wakes the pool."""

import asyncio
from collections.abc import Callable

from kvferry.core.errors import Unavailable
from kvferry.gateway.fleet import Fleet
from kvferry.gateway.holding import Holding
from kvferry.gateway.waking import Waker


class WaitingRoom:
    """One gateway's. First come, first served: the fleet tells of its changes in the order in which was asked."""

    def __init__(self, fleet: Fleet, holding: Holding, waker: Waker | None) -> None:
        """
        Args:
            waker: `None`: nobody is woken.
        """
        self._fleet = fleet
        self._holding = holding
        self._waker = waker

    async def wait(self, may_go: Callable[[], bool], remaining_seconds: float) -> bool:
        """Return once `may_go`; or with `False` once the time is over, the request's own or this room's.

        Raises:
            Overloaded: the room is full.
        """
        with self._holding.held():
            if self._waker is not None:
                self._waker.want()
            try:
                async with asyncio.timeout(min(self._holding.seconds, remaining_seconds)):
                    await self._fleet.wait_until(lambda _: may_go())
            except TimeoutError:
                return False
        return True

    def gave_up(self) -> Unavailable:
        """What one that waited in vain is told."""
        return self._holding.gave_up()
