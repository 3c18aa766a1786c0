"""The pause of a worker: applies the newest state that a gateway or a program has sent, and reports it."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvferry.core.errors import InvalidRequest
from kvferry.core.pausing import MAX_BY_CHARS, PauseMode, PauseState
from kvferry.rpc.pause_wire import pause_mode_from_wire, pause_to_wire
from kvferry.v1 import worker_admin_pb2
from kvferry.workers.calls.context import WorkerContext
from kvferry.workers.handoff.offer_desk import OfferDesk

MAX_WAIT_SECONDS = 3600.0
_POLL_SECONDS = 0.01
_MAX_REVISION = (1 << 63) - 1


class PauseKeeper:
    """The state of one engine. Used on the event loop's thread."""

    def __init__(self, context: WorkerContext, desk: OfferDesk) -> None:
        """
        Args:
            context: state of the worker.
            desk: the open offers, whose prompts continue on other workers.
        """
        self._context = context
        self._desk = desk
        self._turn = asyncio.Lock()
        self.state = PauseState()

    async def set(self, request: worker_admin_pb2.SetPauseRequest) -> worker_admin_pb2.PauseStatus:
        """Apply a state, unless a newer one is known, and wait until a pause is settled; return the present state.

        Raises:
            InvalidRequest: a field is out of range.
            Unavailable: the engine has stopped.
        """
        self._check(request)
        mode = pause_mode_from_wire(request.mode)
        async with self._turn:
            now = self._context.clock.wall()
            since = request.since or now
            if not request.revision:
                await self._apply(self.state.next(mode, request.by, now))
            elif request.revision > self.state.revision:
                await self._apply(PauseState(request.revision, mode, request.by, since))
        if mode is not None:
            await self.settled(request.timeout_seconds)
        return self.status()

    async def settled(self, timeout_seconds: float, *, is_stopped: bool = False) -> bool:
        """Wait until the pause is settled, and return whether it is.

        Args:
            timeout_seconds: maximum time to wait.
            is_stopped: whether the caller has stopped generation (`stopped`), so that only the engine counts.
        """
        deadline = self._context.clock.monotonic() + timeout_seconds
        while not (self._context.loop.is_pause_settled if is_stopped else self.is_settled):
            if (self.state.mode is None and not is_stopped) or self._context.clock.monotonic() >= deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True

    @asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """Stop generation for the length of a `with` block, if it is not paused."""
        async with self._turn:
            if self.state.mode is not None:
                yield
                return
            await self._context.loop.pause_generation(PauseMode.KEEP)
            try:
                yield
            finally:
                await self._context.loop.pause_generation(None)

    @property
    def is_settled(self) -> bool:
        """Whether generation is paused and nothing is in flight. With mode `wait`, neither may a prompt be offered,
        since its request goes on."""
        is_offered = self.state.mode is PauseMode.WAIT and not self._desk.is_idle
        return self.state.mode is not None and self._context.loop.is_pause_settled and not is_offered

    def status(self) -> worker_admin_pb2.PauseStatus:
        """Return the present state as a message."""
        return pause_to_wire(self.state, is_settled=self.is_settled)

    async def _apply(self, state: PauseState) -> None:
        await self._context.loop.pause_generation(state.mode)
        self.state = state

    def _check(self, request: worker_admin_pb2.SetPauseRequest) -> None:
        if len(request.by) > MAX_BY_CHARS or not request.by.isprintable():
            raise InvalidRequest(f"by must have at most {MAX_BY_CHARS} printable characters", field="by")
        if request.revision > _MAX_REVISION:
            raise InvalidRequest(f"revision must be at most {_MAX_REVISION}", field="revision")
        if not (math.isfinite(request.since) and request.since >= 0):
            raise InvalidRequest(f"since must be a time in seconds, not {request.since}", field="since")
        check_timeout(request.timeout_seconds)


def check_timeout(seconds: float) -> None:
    """Check a time limit of a call.

    Raises:
        InvalidRequest: it is negative, too long or not a number.
    """
    if not 0 <= seconds <= MAX_WAIT_SECONDS:
        raise InvalidRequest(
            f"timeout_seconds must be between 0 and {MAX_WAIT_SECONDS:.0f}, not {seconds}", field="timeout_seconds"
        )
