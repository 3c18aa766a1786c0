"""Responses that are created in the background: each runs in a task of its own, which ends without its client.

    queued ──► in_progress ──► completed | incomplete | failed | cancelled

While it runs, a response is read from here; when it has ended, from the store. If gateways share the store, each renews
the leases of its responses there, and learns which were cancelled or deleted at another gateway.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from kvferry.core.errors import InvalidRequest, InvariantBroken, KvferryError, Overloaded, Unavailable
from kvferry.gateway.http.responses.creation import Creation
from kvferry.gateway.http.responses.store import (
    LEASE_SECONDS,
    NewResponse,
    ResponseStore,
    ResponsesUnavailable,
)

MAX_RUNNING, MAX_TENANT_RUNNING = 256, 64
"""Maximum numbers of running responses, of all tenants and of one."""
_RETRY_SECONDS = 5.0
RENEW_SECONDS = 1.0
"""Interval in which leases are renewed, and cancellations of other gateways are seen."""
_POLL_SECONDS = 0.2
"""Interval in which a gateway looks whether another one has ended a response that it cancelled."""
_CANCEL_SECONDS = LEASE_SECONDS + 2.0
"""Time after which a response that another gateway creates has ended or failed after it was cancelled."""
_NUM_WRITES, _WRITE_PAUSE_SECONDS = 4, 1.5
"""How often the result of a response is written if the store does not answer, and the pause in between."""
_log = logging.getLogger(__name__)


class NotStreamed(InvalidRequest):
    """The response has no recorded events: its request did not set both `background` and `stream`."""

    reason = "RESPONSE_NOT_STREAMED"


class BackgroundRun:
    """One response that is being created."""

    def __init__(self, creation: Creation) -> None:
        """
        Args:
            creation: the response, not begun yet.
        """
        self.creation = creation
        self.events: list[bytes] = []
        """All events so far, if the request is streamed; an event's index is its sequence number."""
        self.is_over = False
        self._changed = asyncio.Event()

    def add(self, events: Sequence[bytes]) -> None:
        """Record events and wake the readers, if the response is streamed."""
        if self.creation.is_streamed:
            self.events += events
            self._wake()

    def end(self, events: Sequence[bytes] = ()) -> None:
        """Add the last events, and end the readers' streams."""
        self.is_over = True
        self.add(events)
        self._wake()

    async def read(self, first: int) -> AsyncGenerator[bytes, None]:
        """Yield the events from index `first` on, until the response has ended."""
        place = first
        while True:
            changed = self._changed
            while place < len(self.events):
                yield self.events[place]
                place += 1
            if self.is_over:
                return
            await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(frozen=True, slots=True)
class _Running:
    run: BackgroundRun
    work: "asyncio.Task[list[bytes]]"
    """Creates the response, and is cancelled."""
    task: "asyncio.Task[None]"
    """Waits for `work`, and stores the response."""


class BackgroundRuns:
    """The running responses of all tenants; owns their tasks. Used on the event loop's thread only."""

    def __init__(self, store: ResponseStore) -> None:
        """
        Args:
            store: keeps the responses that have ended.
        """
        self._store = store
        self._runs: dict[tuple[str, str], _Running] = {}
        self._renewal: asyncio.Task[None] | None = None
        self._beginning: list[str] = []
        """Tenants of the responses that wait for the store."""
        self._is_stopping = False

    @property
    def count(self) -> int:
        """Number of running responses."""
        return len(self._runs)

    async def begin(self, tenant: str, creation: Creation) -> BackgroundRun:
        """Begin a response.

        Args:
            tenant: owner of the response.
            creation: the response, not begun yet.

        Raises:
            Overloaded: too many responses are running, or the store has no room.
            ResponsesUnavailable: the server that keeps responses does not answer.
            Unavailable: the gateway is stopping.
        """
        self._check_room(tenant)
        run, key = BackgroundRun(creation), (tenant, creation.response_id)
        run.add(creation.queue())
        self._beginning.append(tenant)
        try:
            is_kept = await self._store.begin(*key, creation.stored())
        finally:
            self._beginning.remove(tenant)
        if not is_kept:
            raise Overloaded("the store of responses has no room for this one", retry_after_seconds=_RETRY_SECONDS)
        if self._is_stopping:  # meanwhile
            await self._store.delete(*key)
            raise _stopping()
        work = asyncio.create_task(_work(run), name=f"background {creation.response_id}")
        task = asyncio.create_task(self._follow(key, run, work), name=f"end of {creation.response_id}")
        self._runs[key] = _Running(run, work, task)
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew(), name="leases of responses")
        return run

    def find(self, tenant: str, response_id: str) -> BackgroundRun | None:
        """Return a tenant's running response; `None` if none runs here with this id."""
        found = self._runs.get((tenant, response_id))
        return None if found is None else found.run

    async def cancel(self, tenant: str, response_id: str) -> None:
        """Cancel a response if it is running here; when this returns, it is stored."""
        found = self._runs.get((tenant, response_id))
        if found is not None:
            found.work.cancel()
            await asyncio.wait((found.task,))

    async def cancel_anywhere(self, tenant: str, response_id: str) -> None:
        """Cancel a response if a gateway creates it; when this returns, it is stored.

        Raises:
            ResponseNotFound: the response was deleted meanwhile.
            ResponsesUnavailable: the server that keeps responses does not answer.
            Unavailable: the other gateway has not ended the response in time.
        """
        if (tenant, response_id) in self._runs:
            await self.cancel(tenant, response_id)
            return
        if not await self._store.cancel(tenant, response_id):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_CANCEL_SECONDS):
                while True:
                    kept = await self._store.read(tenant, response_id, "response_id")
                    if not kept.is_running:
                        return
                    await asyncio.sleep(_POLL_SECONDS)
        raise Unavailable("the gateway that creates the response has not ended it yet; ask again")

    async def stop(self, seconds: float) -> None:
        """Begin no more responses, wait for the running ones, and cancel those that run for longer than `seconds`."""
        self._is_stopping = True
        running = list(self._runs.values())
        if running:
            await asyncio.wait([each.work for each in running], timeout=seconds)
            for each in running:
                each.work.cancel()
            await asyncio.gather(*(each.task for each in running), return_exceptions=True)
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)

    def _check_room(self, tenant: str) -> None:
        if self._is_stopping:
            raise _stopping()
        own = sum(owner == tenant for owner, _ in self._runs) + self._beginning.count(tenant)
        total = self.count + len(self._beginning)
        if own >= MAX_TENANT_RUNNING or total >= MAX_RUNNING:
            raise Overloaded(
                f"{own} responses of the tenant, {total} of all tenants run in the background; at most "
                f"{MAX_TENANT_RUNNING} and {MAX_RUNNING} may",
                retry_after_seconds=_RETRY_SECONDS,
            )

    async def _follow(self, key: tuple[str, str], run: BackgroundRun, work: "asyncio.Task[list[bytes]]") -> None:
        """Wait until a response has ended, store it, and forget it."""
        await asyncio.wait((work,))
        last = [run.creation.cancel()] if work.cancelled() else work.result()
        try:
            await self._keep(key, run.creation.stored((*run.events, *last) if run.creation.is_streamed else ()))
        finally:
            del self._runs[key]
            run.end(last)

    async def _keep(self, key: tuple[str, str], new: NewResponse) -> None:
        for number in range(_NUM_WRITES):
            try:
                if not await self._store.put(*key, new, is_background=True):
                    _log.info("response %s is not kept: it was deleted, has failed, or is too large", key[1])
                return
            except ResponsesUnavailable as error:
                if number == _NUM_WRITES - 1:
                    _log.warning("response %s is lost: %s", key[1], error.message)
                    return
            await asyncio.sleep(_WRITE_PAUSE_SECONDS)

    async def _renew(self) -> None:
        """Renew the leases while responses run, and end those that were cancelled elsewhere."""
        while self._runs:
            await asyncio.wait([each.task for each in self._runs.values()], timeout=RENEW_SECONDS)
            running = [key for key, each in self._runs.items() if not each.work.done()]
            with suppress(ResponsesUnavailable):  # it is noted by the store; the next call may succeed
                for key in await self._store.renew(running) if running else ():
                    if (found := self._runs.get(key)) is not None:
                        found.work.cancel()


def _stopping() -> Unavailable:
    return Unavailable("the gateway is stopping and begins no responses in the background")


async def _work(run: BackgroundRun) -> list[bytes]:
    """Create a response; return its last events, which readers get when it is stored."""
    creation = run.creation
    try:
        async with aclosing(creation.steps()) as steps:
            async for events in steps:
                if creation.is_over:
                    return events  # before a reader can continue from the response
                run.add(events)
    except KvferryError as error:
        _log.info("response %s failed: %s", creation.response_id, error.message)
        return [creation.failed(error)]
    except Exception:
        _log.exception("response %s failed unexpectedly", creation.response_id)
        return [creation.failed(InvariantBroken("internal error; the gateway's log has the details"))]
    return []
