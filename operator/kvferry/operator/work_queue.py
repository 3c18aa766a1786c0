"""Which pools are due: each at most once in line and once at work, with back-off after failures. Pure.

What happens to a pool while it is at work puts it in line again afterwards, so that no event is lost and none is
worked on twice at the same time.
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
    """Keys in line. Times are seconds of one monotonic clock."""

    jitter: Callable[[], float] = random.random
    """From 0 to 1; spreads what failed together."""
    _due: dict[K, float] = field(default_factory=dict)
    _heap: list[tuple[float, int, K]] = field(default_factory=list)
    _at_work: set[K] = field(default_factory=set)
    _dirty: dict[K, float] = field(default_factory=dict)
    _failures: dict[K, int] = field(default_factory=dict)
    _count: int = 0

    def add(self, key: K, at: float) -> None:
        """Have `key` worked on at `at`, or earlier if it is in line for then already."""
        if key in self._at_work:
            self._dirty[key] = min(at, self._dirty.get(key, at))
            return
        if key in self._due and self._due[key] <= at:
            return
        self._due[key] = at
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, key))

    def take(self, now: float) -> K | None:
        """The next key that is due, at work from now on; `None` when none is."""
        while self._heap and self._heap[0][0] <= now:
            at, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == at:
                del self._due[key]
                self._at_work.add(key)
                return key
        return None

    def next_at(self) -> float | None:
        """When the next key is due; `None` when none is in line."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def done(self, key: K, now: float, again_in_seconds: float | None) -> None:
        """The work on `key` succeeded; it is due again after so long, or when something happens."""
        self._failures.pop(key, None)
        self._leave(key, None if again_in_seconds is None else now + again_in_seconds)

    def failed(self, key: K, now: float) -> float:
        """The work on `key` failed; seconds until it is tried again."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        wait = min(_MAX_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2.0**failures) * (0.5 + self.jitter())
        # What happened meanwhile must not jump the back-off: it might be what our own failing writes cause.
        self._dirty.pop(key, None)
        self._leave(key, now + wait)
        return wait

    def forget(self, key: K) -> None:
        """`key` is gone."""
        self._failures.pop(key, None)

    def num_waiting(self, now: float) -> int:
        """Keys that are due or at work; every pool is in line for some later time as well."""
        return sum(at <= now for at in self._due.values()) + len(self._at_work)

    def _leave(self, key: K, at: float | None) -> None:
        self._at_work.discard(key)
        dirty = self._dirty.pop(key, None)
        times = [t for t in (at, dirty) if t is not None]
        if times:
            self.add(key, min(times))
