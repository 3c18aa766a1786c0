"""Responses that are created in the background: each runs in a task of its own, which ends without its client.

    queued ──► in_progress ──► completed | incomplete | failed | cancelled

While it runs, a response is read from here; when it has ended, from the store.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from kvferry.core.errors import InvalidRequest, InvariantBroken, KvferryError, Overloaded, Unavailable
from kvferry.gateway.http.responses.creation import Creation
from kvferry.gateway.http.responses.store import ResponseStore

MAX_RUNNING, MAX_TENANT_RUNNING = 256, 64
"""Maximum numbers of running responses, of all tenants and of one."""
_RETRY_SECONDS = 5.0
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
        """Record events, and wake the readers."""
        if self.creation.is_streamed:
            self.events += events
            self._wake()

    def end(self) -> None:
        """Store the response, and end the readers' streams."""
        self.is_over = True
        self.creation.keep(tuple(self.events))
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


class BackgroundRuns:
    """The running responses of all tenants; owns their tasks. Used on the event loop's thread only."""

    def __init__(self, store: ResponseStore) -> None:
        """
        Args:
            store: keeps the responses that have ended.
        """
        self._store = store
        self._runs: dict[tuple[str, str], tuple[BackgroundRun, asyncio.Task[None]]] = {}
        self._is_stopping = False

    @property
    def count(self) -> int:
        """Number of running responses."""
        return len(self._runs)

    def begin(self, tenant: str, creation: Creation) -> BackgroundRun:
        """Begin a response.

        Args:
            tenant: owner of the response.
            creation: the response, not begun yet.

        Raises:
            Overloaded: too many responses are running.
            Unavailable: the gateway is stopping.
        """
        if self._is_stopping:
            raise Unavailable("the gateway is stopping and begins no responses in the background")
        own = sum(owner == tenant for owner, _ in self._runs)
        if own >= MAX_TENANT_RUNNING or self.count >= MAX_RUNNING:
            raise Overloaded(
                f"{own} responses of the tenant, {self.count} of all tenants run in the background; at most "
                f"{MAX_TENANT_RUNNING} and {MAX_RUNNING} may",
                retry_after_seconds=_RETRY_SECONDS,
            )
        run, key = BackgroundRun(creation), (tenant, creation.response_id)
        run.add(creation.queue())
        task = asyncio.create_task(_work(run), name=f"background {creation.response_id}")
        self._runs[key] = run, task
        self._store.running.add(key)
        task.add_done_callback(lambda done: self._ended(key, is_cancelled=done.cancelled()))
        return run

    def find(self, tenant: str, response_id: str) -> BackgroundRun | None:
        """Return a tenant's running response; `None` if there is none with this id."""
        found = self._runs.get((tenant, response_id))
        return None if found is None else found[0]

    async def cancel(self, tenant: str, response_id: str) -> None:
        """Cancel a response if it is running; when this returns, it is stored."""
        found = self._runs.get((tenant, response_id))
        if found is not None:
            found[1].cancel()
            await asyncio.wait((found[1],))

    async def stop(self, seconds: float) -> None:
        """Begin no more responses, wait for the running ones, and cancel those that run for longer than `seconds`."""
        self._is_stopping = True
        tasks = [task for _, task in self._runs.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, key: tuple[str, str], *, is_cancelled: bool) -> None:
        run, _ = self._runs.pop(key)
        self._store.running.discard(key)
        if is_cancelled:
            run.add([run.creation.cancel()])
        if not run.is_over:
            run.end()


async def _work(run: BackgroundRun) -> None:
    creation = run.creation
    try:
        async with aclosing(creation.steps()) as steps:
            async for events in steps:
                run.add(events)
                if creation.is_over:
                    run.end()  # before a reader can continue from the response
    except KvferryError as error:
        _log.info("response %s failed: %s", creation.response_id, error.message)
        run.add([creation.failed(error)])
    except Exception:
        _log.exception("response %s failed unexpectedly", creation.response_id)
        run.add([creation.failed(InvariantBroken("internal error; the gateway's log has the details"))])
