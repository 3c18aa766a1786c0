"""Scales a pool up from zero while requests wait for it; the decision is in `gateway.decide.routing.holding`."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvferry.core.clock import Clock
from kvferry.gateway.decide.routing.holding import ROLES, Holding, Scaler, WakePolicy
from kvferry.gateway.fleet.pool_api import ApiError, PoolApi

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0
_CONFLICT = 409


class Waker:
    """Scales one pool up from zero. `run` is a background task."""

    def __init__(
        self,
        api: PoolApi,
        holding: Holding,
        clock: Clock,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """
        Args:
            api: access to the scalers of the pool.
            holding: requests that wait for the pool's first worker.
            clock: clock of the wake-up policy.
            sleep: waits between two checks; replaced in tests.
        """
        self._api = api
        self._holding = holding
        self._clock = clock
        self._sleep = sleep
        self._policy = WakePolicy()
        self._is_requested = asyncio.Event()
        self.num_wakes = 0
        """Number of times that a role was scaled from 0 to 1."""
        self.failure = ""
        """Error of the last check; empty if it succeeded or none was needed."""

    def request(self) -> None:
        """Start checking the scalers immediately, because a request is held."""
        self._is_requested.set()

    async def run(self) -> None:
        """Check the scalers every second while a request is held, until cancelled."""
        while True:
            await self._is_requested.wait()
            self._is_requested.clear()
            while self._holding.num_held:
                await self.check()
                await self._sleep(_LOOK_SECONDS)

    async def check(self) -> None:
        """Read the scalers of all roles once; set the replica counts of those that `WakePolicy` chooses to 1."""
        failures: list[str] = []
        scalers: list[Scaler] = []
        for role in ROLES:
            try:
                found = await asyncio.to_thread(self._api.scaler, role)
            except ApiError as failure:
                failures.append(str(failure))
                continue
            scaler = None if found is None else Scaler.read(role, found)
            if scaler is not None:
                scalers.append(scaler)
        for scaler in self._policy.choose(scalers, num_held=self._holding.num_held, now=self._clock.monotonic()):
            try:
                await asyncio.to_thread(self._api.wake, scaler.role, scaler.version)
            except ApiError as failure:
                if failure.status != _CONFLICT:  # conflict: the scaler was changed by a different writer
                    failures.append(str(failure))
            else:
                self.num_wakes += 1
                _log.info("pool %s: scaled role %s from 0 to 1", self._api.pool, scaler.role)
        combined = "; ".join(failures)
        if combined and combined != self.failure:
            _log.warning("pool %s cannot be scaled up from zero: %s", self._api.pool, combined)
        self.failure = combined
