"""Write-behind stores: objects are copied out of the pages immediately and written to slow tiers in the background.

    store ──copy──► arena slot, or a buffer ──┬─► StoreDone: the pages are free
                                              └─► one slow tier after another, one object per thread at a time

Only committed blocks are stored, and requests never wait for a store: objects that do not fit in the queue are dropped
and counted, since their tokens can be recomputed.
"""

import logging
import mmap
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.rare_lines import RareLines, more
from kvferry.kv.interface.tiering import KvListener, StoreDone
from kvferry.kv.tiers.dram import DramTier
from kvferry.kv.tiers.interface.tier import ObjectKey, Presence, Tier, TierError, TierMiss
from kvferry.kv.tiers.policy.recent_stores import RecentStores

_log = logging.getLogger(__name__)

_STORE_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_MAX_STORES = 256
"""Maximum number of objects that are queued or being written."""
_REMEMBERED = 4096
_BUFFER_BYTES = 64 << 20
_MAX_BUFFERS = 64
_THREADS = 2


class WriteBehind:
    """Write-behind queue of one worker's tiers."""

    def __init__(
        self,
        memory: DramTier | None,
        slow: Sequence[Tier],
        object_bytes: int,
        listener: KvListener,
        count: Callable[..., None],
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            memory: the DRAM tier, if any.
            slow: the tiers other than DRAM.
            object_bytes: length of every object.
            listener: called with `StoreDone` for each store.
            count: function (tier name, counters) that adds to a tier's statistics.
            clock: spaces the log lines about failures.
        """
        self._lines = RareLines(clock or SystemClock())
        self._memory = memory
        self._slow = slow
        self._listener = listener
        self._count = count
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="tier-copy")
        self._storing = ThreadPoolExecutor(_THREADS, thread_name_prefix="tier-store")
        self._buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        """Buffers for objects that are written to slow tiers without a DRAM tier."""
        num_buffers = max(_THREADS, min(_MAX_BUFFERS, _BUFFER_BYTES // object_bytes)) if slow else 0
        for _ in range(num_buffers):
            self._buffers.put(memoryview(mmap.mmap(-1, object_bytes)))
        self._recent = RecentStores(_REMEMBERED)
        self._num_active = 0
        self._lock = threading.Lock()  # guards the two fields above, and `_lines`
        self._closing = threading.Event()

    def was_given(self, key: ObjectKey) -> bool:
        """Return whether a store of this object was started recently."""
        with self._lock:
            return key.name in self._recent

    def missed(self, keys: Iterable[ObjectKey]) -> None:
        """Remove objects that a lookup did not find from the set of recent stores, so that they can be stored in the
        future."""
        with self._lock:
            self._recent.miss(key.name for key in keys)

    def store(self, job: int, key: ObjectKey, parts: list[memoryview], prepare: Callable[[], None]) -> None:
        """Store one object in the background. If too many stores are active, it is dropped. `StoreDone` is sent in
        either case.

        Args:
            job: number of the job, which `StoreDone` repeats.
            key: key of the object.
            parts: byte views of the pages; they must not change until `StoreDone`, except by `prepare`.
            prepare: called before the parts are read.
        """
        with self._lock:
            dropped = self._num_active >= _MAX_STORES or self._closing.is_set()
            if not dropped:
                self._num_active += 1
                self._recent.begin(key.name)
        if dropped:
            self._count(self._first, dropped=1)
            self._listener(StoreDone(job))
        else:
            self._copying.submit(self._copy, job, key, parts, prepare)

    @property
    def num_active(self) -> int:
        """Number of objects that are queued or being written."""
        with self._lock:
            return self._num_active

    def close(self) -> None:
        """Drop queued stores, without waiting for writes in flight."""
        self._closing.set()
        for pool in (self._copying, self._storing):
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def _first(self) -> str:
        return "dram" if self._memory is not None else self._slow[0].name

    def _copy(self, job: int, key: ObjectKey, parts: list[memoryview], prepare: Callable[[], None]) -> None:
        try:
            if not self._closing.is_set():
                prepare()
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
        """Copy an object out of the pages; return the copy for the slow tiers, or `None` if they need not store the
        object."""
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
        """Wait for a buffer, at most for the time-out of a store; the pages are held during the wait."""
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
                with suppress(TierMiss), source.reading(key.name) as content:  # TierMiss: the object was evicted
                    is_there = self._write_to_each(key, content)
        except Exception:
            _log.exception("a store failed")
        finally:
            if isinstance(source, memoryview):
                self._buffers.put(source)
            self._ended(key, is_there=is_there)

    def _write_to_each(self, key: ObjectKey, content: memoryview) -> bool:
        """Write an object to each slow tier; return whether all slow tiers have it now."""
        kept = 0
        for tier in self._slow:
            try:
                if not self._closing.is_set() and tier.store(key, [content], _STORE_SECONDS):
                    self._count(tier.name, stores=1, bytes_stored=len(content))
                kept += 1
            except TierError as error:
                self._count(tier.name, failures=1)
                with self._lock:
                    left_out = self._lines.left_out(f"{tier.name} {error}")
                if left_out is not None:
                    _log.warning("objects are not stored in tier %s: %s%s", tier.name, error, more(left_out))
        return kept == len(self._slow)

    def _ended(self, key: ObjectKey, *, is_there: bool) -> None:
        with self._lock:
            self._num_active -= 1
            self._recent.end(key.name, is_there=is_there)
