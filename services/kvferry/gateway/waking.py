"""Wakes a pool that was scaled to zero while requests wait for it; the decision is in `gateway.holding`."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvferry.core.clock import Clock
from kvferry.gateway.holding import ROLES, Holding, Scaler, WakePolicy
from kvferry.gateway.pool_api import ApiTrouble, PoolApi

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0
_CONFLICT = 409


class Waker:
    """One pool's. `run` is a task of its own."""

    def __init__(
        self,
        api: PoolApi,
        holding: Holding,
        clock: Clock,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._holding = holding
        self._clock = clock
        self._sleep = sleep
        self._policy = WakePolicy()
        self._is_wanted = asyncio.Event()
        self.num_wakes = 0
        """Roles set from 0 to 1."""
        self.trouble = ""
        """Why it could not, the last time that it was wanted; empty: it could, or was not."""

    def want(self) -> None:
        """Somebody waits: look at once."""
        self._is_wanted.set()

    async def run(self) -> None:
        """Until cancelled: while anything is held, look every second who is to be woken."""
        while True:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            while self._holding.num_held:
                await self.look()
                await self._sleep(_LOOK_SECONDS)

    async def look(self) -> None:
        """Look once at all roles' scalers, and wake what may be woken."""
        troubles: list[str] = []
        scalers: list[Scaler] = []
        for role in ROLES:
            try:
                found = await asyncio.to_thread(self._api.scaler, role)
            except ApiTrouble as trouble:
                troubles.append(str(trouble))
                continue
            scaler = None if found is None else Scaler.read(role, found)
            if scaler is not None:
                scalers.append(scaler)
        for scaler in self._policy.choose(scalers, num_held=self._holding.num_held, now=self._clock.monotonic()):
            try:
                await asyncio.to_thread(self._api.wake, scaler.role, scaler.version)
            except ApiTrouble as trouble:
                if trouble.status != _CONFLICT:  # that one means that somebody else has just changed it
                    troubles.append(str(trouble))
            else:
                self.num_wakes += 1
                _log.info("pool %s: woke %s", self._api.pool, scaler.role)
        heard = "; ".join(troubles)
        if heard and heard != self.trouble:
            _log.warning("pool %s cannot be woken: %s", self._api.pool, heard)
        self.trouble = heard
