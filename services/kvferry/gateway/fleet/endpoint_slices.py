"""Lists and watches a pool's EndpointSlices in a separate thread that stops when the reader closes the iterator.

A watch resumes from the last resource version. When the server has expired that version, and also every few minutes,
all slices are listed again, so that a lost event is corrected within minutes. Failures are reported and retried.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from kvferry.core.clock import Clock
from kvferry.gateway.decide.routing.discovery import SliceCache, Update, WatchEnded
from kvferry.gateway.fleet.pool_api import ApiError, PoolApi, Watch

_log = logging.getLogger(__name__)

_RELIST_SECONDS = 300.0
_FIRST_PAUSE_SECONDS = 0.2
_MAX_PAUSE_SECONDS = 10.0
_JOIN_SECONDS = 5.0


class EndpointSlices:
    """Yields the workers of one pool from its EndpointSlices; implements `discovery.Source`."""

    def __init__(
        self,
        api: PoolApi,
        clock: Clock,
        *,
        relist_seconds: float = _RELIST_SECONDS,
        cache: Callable[[], SliceCache] = SliceCache,
    ) -> None:
        """
        Args:
            api: client of the API server.
            clock: clock of the pauses between retries.
            relist_seconds: time between two complete lists.
            cache: makes the cache of the listed objects.
        """
        self._cache = cache
        self._api = api
        self._clock = clock
        self._relist_seconds = relist_seconds

    async def updates(self) -> AsyncIterator[Update]:
        """Yield the pool's workers whenever they change; see `discovery.Source.updates`."""
        follower = _Follower(self._api, self._clock, self._relist_seconds, self._cache)
        follower.start()
        try:
            while True:
                yield await follower.next()
        finally:
            await follower.stop()


class _Follower:
    """A thread that lists and watches the slices; stores the latest update."""

    def __init__(self, api: PoolApi, clock: Clock, relist_seconds: float, cache: Callable[[], SliceCache]) -> None:
        self._make_cache = cache
        self._api = api
        self._clock = clock
        self._relist_seconds = relist_seconds
        self._loop = asyncio.get_running_loop()
        self._latest: Update | None = None
        self._said = asyncio.Event()
        self._stopped = threading.Event()
        self._watching = threading.Lock()  # guards _watch: the loop's thread may stop it
        self._watch: Watch | None = None
        self._has_failed = True
        self._thread = threading.Thread(target=self._run, name="endpoint-slices", daemon=True)

    # ------------------------------------------------------------------ the event loop's thread

    def start(self) -> None:
        self._thread.start()

    async def next(self) -> Update:
        await self._said.wait()
        self._said.clear()
        latest, self._latest = self._latest, None
        assert latest is not None  # `_receive` sets both
        return latest

    async def stop(self) -> None:
        self._stopped.set()
        with self._watching:
            if self._watch is not None:
                self._watch.stop()
        await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)

    def _receive(self, update: Update) -> None:
        before = self._latest
        if update.listings is None and before is not None:  # after a failure, the known listings stay
            update = Update(before.listings, update.failure)
        self._latest = update
        self._said.set()

    # ------------------------------------------------------------------ the follower's own thread

    def _run(self) -> None:
        cache = self._make_cache()
        relist_at = 0.0
        pause = _FIRST_PAUSE_SECONDS
        while not self._stopped.is_set():
            begun = self._clock.monotonic()
            try:
                if not cache.version or begun >= relist_at:
                    cache.replace(self._api.list_slices())
                    relist_at = begun + self._relist_seconds
                    self._publish(Update(cache.listings()))
                self._follow(cache, relist_at - begun)
            except WatchEnded as ended:
                _log.info("%s", ended)
            except ApiError as failure:
                if failure.status == 410:
                    cache.version = ""
                else:
                    self._publish(Update(None, str(failure)))
            except Exception as error:  # a bug must not stop the thread
                _log.exception("watching the pool's EndpointSlices failed unexpectedly")
                cache.version = ""
                self._publish(Update(None, f"unexpected {type(error).__name__}; the log has the details"))
            if self._clock.monotonic() - begun > _MAX_PAUSE_SECONDS:
                pause = _FIRST_PAUSE_SECONDS
            self._stopped.wait(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def _follow(self, cache: SliceCache, seconds: float) -> None:
        with self._api.watch_slices(cache.version, seconds) as watch:
            with self._watching:
                self._watch = watch
                if self._stopped.is_set():
                    return
            try:
                if self._has_failed:
                    self._publish(Update(cache.listings()))
                for event in watch:
                    if cache.apply(event):
                        self._publish(Update(cache.listings()))
            finally:
                with self._watching:
                    self._watch = None

    def _publish(self, update: Update) -> None:
        self._has_failed = bool(update.failure)
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._receive, update)
