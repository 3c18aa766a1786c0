"""Holds requests until a pool has its first worker; a held request scales the pool up from zero."""

import asyncio
from collections.abc import Callable

from kvferry.core.errors import Unavailable
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.gateway.fleet.waking import Waker
from kvferry.gateway.routing.holding import Holding


class WaitingRoom:
    """Held requests of one gateway, served in order of arrival."""

    def __init__(self, fleet: Fleet, holding: Holding, waker: Waker | None) -> None:
        """
        Args:
            waker: scales the pool up from zero; `None` disables scaling up.
        """
        self._fleet = fleet
        self._holding = holding
        self._waker = waker

    async def wait(self, may_go: Callable[[], bool], remaining_seconds: float) -> bool:
        """Wait until `may_go()` is true.

        Returns:
            `True`, or `False` if `remaining_seconds` or the configured hold time passed first.

        Raises:
            Overloaded: `max_held` samples are waiting already.
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
        """Return the error for a request that was held for the maximum time without a worker becoming available."""
        return self._holding.gave_up()
