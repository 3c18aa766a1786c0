"""Tier stack: all tiers of one worker behind the interface `KvTiers`; looks up KV in order of the tiers, loads it from
the nearest and stores it to each.

    pages <--copy--> DRAM arena <--read, write behind--> disk, Redis, in the order given
      ^ |                                                   ^ |
      | +------ copy to a buffer, write behind -------------+ |    without a DRAM tier
      +-------------------------------------------------------+

If there is a DRAM tier, all objects pass through it: a load from a slower tier goes to a slot of the arena and is
copied from there to the pages, so that the next load hits DRAM, and objects of a queued prompt can be prefetched. A
lookup of a slot that is being filled returns NOT_YET: other requests wait for that read instead of starting a second
read.

Work is divided among small thread pools, so that no thread waits for another thread of the same pool: `ask` (lookups),
`fetch` (slow reads), `load` (copies, may wait for a fetch), and the threads of `write_behind`. Every wait is bounded by
the deadline of its load.
"""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvferry.core.clock import Clock
from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockHash, BlockId, RequestId
from kvferry.kv.interface.connector import LoadOutcome, LoadPart, PagesQuiet
from kvferry.kv.interface.mirror import SAME_PAGES, CopyError, PageMirror
from kvferry.kv.interface.tiering import KvListener, TierAnswer, TierSource
from kvferry.kv.tiers.dram import DramTier
from kvferry.kv.tiers.interface.tier import ObjectKey, Presence, Tier, TierError, TierMiss
from kvferry.kv.tiers.stats import TierStats
from kvferry.kv.tiers.write_behind import WriteBehind

_log = logging.getLogger(__name__)

_ASK_SECONDS = 0.1
"""Time-out of a lookup in seconds; if a tier exceeds it, all objects count as missing from that tier."""
_LATE_SECONDS = 0.2
_ASKING_THREADS = 2
_HELD_SHARE = 0.5
"""Maximum share of the pages that stores may hold. A store holds its pages for about 1 ms, or longer if all buffers are
in use."""


@dataclass(slots=True)
class _Job:
    number: int
    request_id: RequestId
    source: TierSource
    into: list[list[memoryview]]
    """For each object, the target buffers of its blocks, in order. Blocks that are not needed have scratch buffers,
    since a tier may verify the whole object in its target buffers."""
    pages: list[Sequence[BlockId]]
    """For each object, the pages of its blocks that are needed."""
    started: float
    left: int
    arrived: list[bool] = field(default_factory=list)
    parts: dict[str, LoadPart] = field(default_factory=dict)
    failure: str = ""
    cancelled: threading.Event = field(default_factory=threading.Event)


class TierStack:
    """`KvTiers` implementation over one worker's tiers."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        pages: memoryview,
        *,
        block_bytes: int,
        object_blocks: int,
        block_pages: int = 1,
        listener: KvListener,
        clock: Clock,
        parallel: int = 4,
        mirror: PageMirror = SAME_PAGES,
    ) -> None:
        """
        Args:
            tiers: the tiers, nearest first; a DRAM tier, if any, must be the first.
            pages: the memory of the pages that transports access.
            block_bytes: bytes of one page.
            object_blocks: number of blocks per storage object.
            block_pages: number of pages of a block, one for each layer group.
            listener: called with answers and outcomes, on a thread of this stack.
            clock: clock of the deadlines.
            parallel: number of objects that are read from slow tiers concurrently.
            mirror: mapping between `pages` and the engine's pages.

        Raises:
            InvariantBroken: `tiers` is empty, or a DRAM tier is not the first.
        """
        if not tiers or any(isinstance(t, DramTier) for t in tiers[1:]):
            raise InvariantBroken("a stack needs at least one tier, and a DRAM tier must be the first")
        self.tiers = tuple(tiers)
        self.object_blocks = object_blocks
        self._object_pages = object_blocks * block_pages
        self._memory = tiers[0] if isinstance(tiers[0], DramTier) else None
        self._slow = {t.name: t for t in tiers if t is not self._memory}
        self._pages = pages
        self._mirror = mirror
        self._block_bytes = block_bytes
        self._listener = listener
        self._clock = clock
        self.stats = {t.name: TierStats(t.name) for t in tiers}
        self._asking = ThreadPoolExecutor(_ASKING_THREADS, thread_name_prefix="tier-ask")
        self._fetching = ThreadPoolExecutor(parallel, thread_name_prefix="tier-fetch")
        self._loading = ThreadPoolExecutor(parallel, thread_name_prefix="tier-load")
        self._behind = WriteBehind(
            self._memory, tuple(self._slow.values()), block_bytes * self._object_pages, listener, self._count, clock
        )
        self._jobs: dict[int, _Job] = {}
        self._waiting_requests: dict[BlockHash, set[RequestId]] = {}
        """Requests that wait for an object whose prefetch is queued, by the object's name."""
        self._lock = threading.Lock()  # guards the two fields above and `stats`; not held during blocking calls
        self._closing = threading.Event()

    # ------------------------------------------------------------------ the engine's thread

    @property
    def held_share(self) -> float:
        return _HELD_SHARE

    def ask(self, request_id: RequestId, keys: Sequence[ObjectKey]) -> TierAnswer | None:
        near = [Presence.NO] * len(keys) if self._memory is None else self._memory.ask(keys)
        run = next((i for i, found in enumerate(near) if found is Presence.NO), len(keys))
        sources = ["dram"] * run
        if self._memory is not None:
            self._count("dram", hits=run, misses=len(keys) - run)
        if run == len(keys) or not self._slow or self._closing.is_set():
            return TierAnswer(request_id, tuple(sources))
        # A lookup that blocks in the kernel (for example on a stale mount) ignores its deadline; the timer then answers
        # with the DRAM result. If the engine receives two answers, it ignores the second.
        late = threading.Timer(_ASK_SECONDS + _LATE_SECONDS, self._listener, [TierAnswer(request_id, tuple(sources))])
        late.daemon = True
        late.start()
        self._asking.submit(self._ask_slow, request_id, list(keys), list(sources), self._clock.monotonic(), late)
        return None

    def prefetch(self, request_id: RequestId, source: TierSource) -> None:
        if self._memory is None:
            return
        for key, where in zip(source.keys, source.sources, strict=True):
            if where == "dram" or self._memory.lookup([key], 0.0)[0] is not Presence.NO:
                continue
            with self._lock:
                waiting = self._waiting_requests.get(key.name)
                if waiting is not None:
                    waiting.add(request_id)
                    continue
                self._waiting_requests[key.name] = {request_id}
            self._fetching.submit(self._prefetch_kv, key, where, source.seconds)

    def start(
        self, job: int, request_id: RequestId, source: object, first_block: int, targets: Sequence[BlockId]
    ) -> None:
        if not isinstance(source, TierSource):
            raise InvariantBroken(f"a tier load needs keys, not {type(source).__name__}")
        size = self._object_pages
        made = _Job(job, request_id, source, [], [], self._clock.monotonic(), 0)
        here = first_block % size  # leading blocks of the first object that the sequence already has; they are read too
        scratch = memoryview(bytearray(here * self._block_bytes))
        first = first_block // size - source.first_object  # earlier objects are already in the prefix cache
        if first < 0:
            raise InvariantBroken(
                f"block {first_block} precedes object {source.first_object}, the first that was looked up"
            )
        for index in range(first, len(source.keys)):
            start = (source.first_object + index) * size - first_block
            if start + size > len(targets):
                raise InvariantBroken(f"{len(targets)} targets do not cover object {index}")
            pages = targets[max(0, start) : start + size]
            aside = [self._block(scratch, i) for i in range(max(0, -start))]
            made.into.append([*aside, *(self._block(self._pages, b) for b in pages)])
            made.pages.append(pages)
        made.left = len(made.into)
        made.arrived = [False] * made.left
        with self._lock:
            self._jobs[job] = made
        if not made.left:
            self._end(made)
        for i in range(len(made.into)):
            self._loading.submit(self._load, made, i, source.keys[first + i], source.sources[first + i])

    def accepts(self, key: ObjectKey) -> bool:
        if self._memory is not None:
            return self._memory.lookup([key], 0.0)[0] is Presence.NO
        return not self._behind.was_given(key)

    def store(self, job: int, key: ObjectKey, pages: Sequence[BlockId]) -> None:
        parts = [self._block(self._pages, b) for b in pages]
        self._behind.store(job, key, parts, lambda: self._mirror.to_host(pages, None))

    def cancel(self, request_id: RequestId) -> None:
        with self._lock:
            for job in self._jobs.values():
                if job.request_id == request_id:
                    job.cancelled.set()
            for name in [n for n, waiting in self._waiting_requests.items() if request_id in waiting]:
                self._waiting_requests[name].discard(request_id)

    @property
    def num_active(self) -> int:
        with self._lock:
            return len(self._jobs) + self._behind.num_active

    def close(self) -> None:
        """Cancel all jobs, drop queued stores and close the tiers, without waiting for reads in flight."""
        self._closing.set()
        with self._lock:
            for job in self._jobs.values():
                job.cancelled.set()
        for pool in (self._asking, self._fetching, self._loading):
            pool.shutdown(wait=False, cancel_futures=True)
        self._behind.close()
        for tier in self.tiers:
            tier.close()

    # ------------------------------------------------------------------ lookup and prefetch

    def _ask_slow(
        self,
        request_id: RequestId,
        keys: list[ObjectKey],
        sources: list[str],
        since: float,
        late: threading.Timer,
    ) -> None:
        """Extend a lookup to the slow tiers, object by object, each from the nearest tier that has it. A run may use
        several tiers."""
        try:
            answers: dict[str, list[Presence]] = {}
            for name, tier in self._slow.items():
                left = _ASK_SECONDS - (self._clock.monotonic() - since)
                if left <= 0:
                    break
                answers[name] = tier.lookup(keys, left)
                self._count(name, hits=sum(a is Presence.YES for a in answers[name]))
            if len(answers) == len(self._slow):
                found = zip(*answers.values(), strict=True)
                self._behind.missed(k for k, a in zip(keys, found, strict=True) if set(a) == {Presence.NO})
            near = [Presence.NO] * len(keys) if self._memory is None else self._memory.lookup(keys, 0.0)
            for i in range(len(sources), len(keys)):
                where = next((n for n, a in answers.items() if a[i] is not Presence.NO), None)
                where = "dram" if near[i] is not Presence.NO else where
                if where is None:
                    break
                sources.append(where)
        except Exception:
            _log.exception("tier lookup failed", extra={"request_id": request_id})
        late.cancel()
        self._listener(TierAnswer(request_id, tuple(sources)))

    def _prefetch_kv(self, key: ObjectKey, where: str, seconds: float) -> None:
        with self._lock:
            requests = self._waiting_requests.pop(key.name)
        if requests and not self._closing.is_set():
            try:
                self._into_memory(key, where, self._clock.monotonic() + seconds)
            except TierError as error:
                _log.info("prefetch failed: %s", error)

    def _into_memory(self, key: ObjectKey, where: str, deadline: float) -> bool:
        """Read an object from a slow tier into the arena; return `False` if the arena rejected the object or already
        has it.

        Raises:
            TierError: the read failed.
        """
        memory = self._memory
        slot = None if memory is None else memory.reserve(key)
        if memory is None or slot is None:
            return False
        try:
            self._read(key, where, [slot], deadline)
        except BaseException:
            memory.abandon(key.name)
            raise
        memory.commit(key.name)
        return True

    def _read(self, key: ObjectKey, where: str, into: Sequence[memoryview], deadline: float) -> None:
        begun = self._clock.monotonic()
        left = deadline - begun
        if left <= 0:
            raise TierError("the deadline passed before the load started")
        try:
            self._slow[where].load(key, into, left)
        except TierError:
            self._count(where, failures=1)
            self._behind.missed([key])
            raise
        seconds = self._clock.monotonic() - begun
        self._count(where, loads=1, bytes_loaded=sum(map(len, into)), seconds=seconds)

    # ------------------------------------------------------------------ loads

    def _load(self, job: _Job, index: int, key: ObjectKey, where: str) -> None:
        deadline = job.started + job.source.seconds
        try:
            if job.cancelled.is_set():
                raise TierError("cancelled")
            self._mirror.settle()
            used = self._load_object(key, where, job.into[index], deadline)
            job.arrived[index] = True
        except TierError as error:
            used = where
            self._note_failure(job, f"{where}: {error}")
        except Exception:
            used = where
            self._note_failure(job, f"{where}: internal error while loading")
            _log.exception("load failed", extra={"request_id": job.request_id})
        with self._lock:
            if job.arrived[index]:
                part = job.parts.get(used, LoadPart(used, 0, 0.0))
                took = self._clock.monotonic() - job.started
                job.parts[used] = LoadPart(used, part.num_bytes + sum(map(len, job.into[index])), took)
            job.left -= 1
            last = job.left == 0
        if last:
            self._end(job)

    def _load_object(self, key: ObjectKey, where: str, into: Sequence[memoryview], deadline: float) -> str:
        """Load one object into pages; return the tier from which it was read.

        Raises:
            TierError: the load failed or took too long.
        """
        memory = self._memory
        if memory is None:
            self._read(key, where, into, deadline)
            return where
        slow = where if where in self._slow else next(iter(self._slow), "")
        used = slow or "dram"
        if memory.lookup([key], 0.0)[0] is Presence.YES:
            used = "dram"  # the object may have been prefetched; the load is counted for DRAM
        elif self._when_written(key, deadline) is not Presence.YES:
            if not slow:
                raise TierMiss("the object was evicted before it was read")
            fetched = self._into_memory(key, slow, deadline)
            if not fetched and self._when_written(key, deadline) is not Presence.YES:
                self._read(key, slow, into, deadline)  # the arena rejected the object: read it directly into the pages
                return slow
        begun = self._clock.monotonic()
        memory.load(key, into, 0.0)
        self._count("dram", loads=1, bytes_loaded=sum(map(len, into)), seconds=self._clock.monotonic() - begun)
        return used

    def _when_written(self, key: ObjectKey, deadline: float) -> Presence:
        """Wait until an object has been written or the deadline has passed; return the object's presence in DRAM."""
        if self._memory is None:
            return Presence.NO
        return self._memory.wait_written(key.name, max(0.0, deadline - self._clock.monotonic()))

    def _note_failure(self, job: _Job, message: str) -> None:
        with self._lock:
            job.failure = job.failure or message

    def _end(self, job: _Job) -> None:
        whole = next((i for i, here in enumerate(job.arrived) if not here), len(job.arrived))
        with self._lock:
            del self._jobs[job.number]
        pages = [page for part in job.pages[:whole] for page in part]
        try:
            self._mirror.to_device(pages)
        except CopyError as error:
            whole, pages, job.failure = 0, [], str(error)
        self._listener(
            LoadOutcome(
                request_id=job.request_id,
                job=job.number,
                failure=None if whole == len(job.arrived) and not job.failure else job.failure,
                num_blocks=len(pages),
                num_bytes=len(pages) * self._block_bytes,
                seconds=self._clock.monotonic() - job.started,
                parts=tuple(job.parts.values()),
                source=job.source.sources[0],
            )
        )
        self._listener(PagesQuiet(job.number))

    # ------------------------------------------------------------------ helpers

    def _block(self, memory: memoryview, index: int) -> memoryview:
        return memory[index * self._block_bytes : (index + 1) * self._block_bytes]

    def _count(self, tier: str, **more: float) -> None:
        with self._lock:
            self.stats[tier].add(**more)
