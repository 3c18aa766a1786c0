"""Work queue with back-off. Each key is queued at most once and is not processed twice concurrently. Pure.

A key that is added while it is being processed is requeued afterwards, so that no event is lost.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K")
_FIRST_BACKOFF_SECONDS = 0.5
_MAX_BACKOFF_SECONDS = 120.0


@dataclass(slots=True)
class WorkQueue(Generic[K]):
    """Work queue of keys. All times are in seconds, by the same monotonic clock."""

    jitter: Callable[[], float] = random.random
    """Function that returns a random number from 0 to 1, to spread the retries of keys that failed together."""
    _due: dict[K, float] = field(default_factory=dict)
    _heap: list[tuple[float, int, K]] = field(default_factory=list)
    _processing: set[K] = field(default_factory=set)
    _dirty: dict[K, float] = field(default_factory=dict)
    _failures: dict[K, int] = field(default_factory=dict)
    _count: int = 0

    def add(self, key: K, at: float) -> None:
        """Queue `key` for time `at`, or keep its due time if that is earlier."""
        if key in self._processing:
            self._dirty[key] = min(at, self._dirty.get(key, at))
            return
        if key in self._due and self._due[key] <= at:
            return
        self._due[key] = at
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, key))

    def take(self, now: float) -> K | None:
        """Take the next due key for processing; return `None` if no key is due."""
        while self._heap and self._heap[0][0] <= now:
            at, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == at:
                del self._due[key]
                self._processing.add(key)
                return key
        return None

    def next_at(self) -> float | None:
        """Return the time when the next key is due; `None` if no key is queued."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def done(self, key: K, now: float, again_in_seconds: float | None) -> None:
        """Record that `key` was processed; requeue it after `again_in_seconds`, or earlier if it was added since."""
        self._failures.pop(key, None)
        self._leave(key, None if again_in_seconds is None else now + again_in_seconds)

    def failed(self, key: K, now: float) -> float:
        """Record that processing `key` failed, and requeue it; return the delay before the next attempt in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        wait = min(_MAX_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2.0**failures) * (0.5 + self.jitter())
        # Events that arrived during processing must not bypass the back-off, since the failed writes may have caused
        # them.
        self._dirty.pop(key, None)
        self._leave(key, now + wait)
        return wait

    def forget(self, key: K) -> None:
        """Drop the failure count of a deleted key."""
        self._failures.pop(key, None)

    def num_waiting(self, now: float) -> int:
        """Return the number of keys that are due or being processed; keys queued for later are not counted."""
        return sum(at <= now for at in self._due.values()) + len(self._processing)

    def _leave(self, key: K, at: float | None) -> None:
        self._processing.discard(key)
        dirty = self._dirty.pop(key, None)
        times = [t for t in (at, dirty) if t is not None]
        if times:
            self.add(key, min(times))
