"""The way down: objects leave the pages at once, and reach slow tiers when those have time.

    store ──copy──► arena slot, or a buffer ──┬─► StoreDone: the pages are free
                                              └─► each slow tier in turn, as many objects at a time as there are threads

Only committed blocks come here, and nobody waits for them: what does not fit the queue is dropped and counted, since a
prompt computed once can be computed again.
"""

import logging
import mmap
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from kvferry.kv.connector import LoadListener
from kvferry.kv.tiering import StoreDone
from kvferry.kv.tiers.dram import DramTier
from kvferry.kv.tiers.lately import Lately
from kvferry.kv.tiers.tier import ObjectKey, Presence, Tier, TierError, TierMiss

_log = logging.getLogger(__name__)

_STORE_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_MAX_STORES = 256
"""Objects that wait or are written."""
_REMEMBERED = 4096
_BUFFER_BYTES = 64 << 20
_MAX_BUFFERS = 64
_THREADS = 2


class WriteBehind:
    """All stores of one worker's tiers."""

    def __init__(
        self,
        memory: DramTier | None,
        slow: Sequence[Tier],
        object_bytes: int,
        listener: LoadListener,
        count: Callable[..., None],
    ) -> None:
        """
        Args:
            listener: hears `StoreDone`.
            count: adds to a tier's statistics, by its name.
        """
        self._memory = memory
        self._slow = slow
        self._listener = listener
        self._count = count
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="tier-copy")
        self._storing = ThreadPoolExecutor(_THREADS, thread_name_prefix="tier-store")
        self._buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        """Where objects wait to be written when no memory tier keeps them."""
        num_buffers = max(_THREADS, min(_MAX_BUFFERS, _BUFFER_BYTES // object_bytes)) if slow else 0
        for _ in range(num_buffers):
            self._buffers.put(memoryview(mmap.mmap(-1, object_bytes)))
        self._lately = Lately(_REMEMBERED)
        self._num_active = 0
        self._lock = threading.Lock()  # guards the two above
        self._closing = threading.Event()

    def was_given(self, key: ObjectKey) -> bool:
        """Whether an object was stored, or tried, a short while ago."""
        with self._lock:
            return key.name in self._lately

    def missed(self, keys: Iterable[ObjectKey]) -> None:
        """These were asked for and are not there: whoever has them may store them again."""
        with self._lock:
            self._lately.miss(key.name for key in keys)

    def store(self, job: int, key: ObjectKey, parts: list[memoryview]) -> None:
        """Keep one object; `parts` must stay as they are until `StoreDone`."""
        with self._lock:
            dropped = self._num_active >= _MAX_STORES or self._closing.is_set()
            if not dropped:
                self._num_active += 1
                self._lately.begin(key.name)
        if dropped:
            self._count(self._first, dropped=1)
            self._listener(StoreDone(job))
        else:
            self._copying.submit(self._copy, job, key, parts)

    @property
    def num_active(self) -> int:
        """Objects that wait or are written."""
        with self._lock:
            return self._num_active

    def close(self) -> None:
        """Drop what waits; does not wait for a write in flight."""
        self._closing.set()
        for pool in (self._copying, self._storing):
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def _first(self) -> str:
        return "dram" if self._memory is not None else self._slow[0].name

    def _copy(self, job: int, key: ObjectKey, parts: list[memoryview]) -> None:
        try:
            source = None if self._closing.is_set() else self._copied(key, parts)
            if source is not None:
                self._storing.submit(self._write, key, source)
                return
        except Exception:
            _log.exception("a store failed")
        finally:
            self._listener(StoreDone(job))
        self._ended(key, is_there=not self._slow)

    def _copied(self, key: ObjectKey, parts: list[memoryview]) -> DramTier | memoryview | None:
        """Where the slow tiers can read it; `None`: they need not."""
        memory = self._memory
        if memory is not None:
            if memory.store(key, parts, 0.0):
                self._count("dram", stores=1, bytes_stored=sum(map(len, parts)))
            if not self._slow or memory.lookup([key], 0.0)[0] is Presence.YES:
                return memory if self._slow else None
        buffer = self._free_buffer()
        if buffer is None:
            self._count(self._first, dropped=1)
            return None
        start = 0
        for part in parts:
            buffer[start : start + len(part)] = part
            start += len(part)
        return buffer

    def _free_buffer(self) -> memoryview | None:
        """One comes back within the time of a store; until then the pages are held."""
        for _ in range(int(_STORE_SECONDS / _LOOK_SECONDS)):
            if self._closing.is_set():
                return None
            with suppress(queue.Empty):
                return self._buffers.get(timeout=_LOOK_SECONDS)
        return None

    def _write(self, key: ObjectKey, source: DramTier | memoryview) -> None:
        is_there = False
        try:
            if isinstance(source, memoryview):
                is_there = self._write_to_each(key, source)
            else:
                with suppress(TierMiss), source.reading(key.name) as content:  # evicted already: it is too late
                    is_there = self._write_to_each(key, content)
        except Exception:
            _log.exception("a store failed")
        finally:
            if isinstance(source, memoryview):
                self._buffers.put(source)
            self._ended(key, is_there=is_there)

    def _write_to_each(self, key: ObjectKey, content: memoryview) -> bool:
        """Whether all of them have it now."""
        kept = 0
        for tier in self._slow:
            try:
                if not self._closing.is_set() and tier.store(key, [content], _STORE_SECONDS):
                    self._count(tier.name, stores=1, bytes_stored=len(content))
                kept += 1
            except TierError as error:
                self._count(tier.name, failures=1)
                _log.info("not stored in %s: %s", tier.name, error)
        return kept == len(self._slow)

    def _ended(self, key: ObjectKey, *, is_there: bool) -> None:
        with self._lock:
            self._num_active -= 1
            self._lately.end(key.name, is_there=is_there)
