"""Whether a request passes, waits or is shed while all endpoints are full. No I/O.

Requests of a negative priority are shed at once. Others wait, in the order of the gateway's queue (`decide.flow`):
priority first, then fair shares of the fairness ids, then arrival. After the longest wait a request passes anyway: its
model server has a queue of its own, and the client a deadline. A queue that is full refuses the newest request of the
lowest priority.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.gateway.decide.flow.fair_queue import EntryEvent, EntryState, FairQueue, QueueEntry, StrictOrder
from kvferry.picker.decide.exchange import Refusal

MAX_FAIRNESS_CHARS = 256
_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SaturationConfig:
    """Bounds from which an endpoint is full, and of the queue."""

    max_waiting: int = 5
    """Waiting requests on an endpoint."""
    max_usage: float = 0.95
    """Share of its KV memory in use."""
    queue_seconds: float = 1.0
    """Longest wait in seconds; less than the message timeout of the proxy."""
    max_queued: int = 1024
    objectives: Mapping[str, int] | None = None
    """Priority by objective; a higher number is served first, a negative one may be shed. Others have 0."""

    def priority(self, objective: str) -> int:
        """Return the priority of an objective; 0 if it is not listed."""
        return (self.objectives or {}).get(objective, 0)


class SaturationQueue:
    """The waiting requests of one picker. Not thread-safe."""

    def __init__(self, config: SaturationConfig) -> None:
        self._config = config
        self._queue = FairQueue(StrictOrder())
        self._number = 0

    def __len__(self) -> int:
        return len(self._queue)

    def enter(self, objective: str, fairness: str, cost: int, *, is_saturated: bool) -> QueueEntry | Refusal | None:
        """Return `None` if a request passes, the entry with which it waits, or a refusal.

        Args:
            objective: name of its objective; may be empty.
            fairness: id of those whose requests share; may be empty.
            cost: expected tokens.
            is_saturated: whether all endpoints are full.
        """
        if not is_saturated and not self._queue:
            return None
        priority = self._config.priority(objective)
        if priority < 0:
            return Refusal(429, "all endpoints are full; retry later", "shed", _RETRY_SECONDS)
        if self._config.queue_seconds <= 0:
            return None
        self._number += 1
        entry = QueueEntry(fairness[:MAX_FAIRNESS_CHARS], -priority, float(max(1, cost)), number=self._number)
        if len(self._queue) >= self._config.max_queued and not self._displace(entry):
            return Refusal(429, "all endpoints and the queue are full; retry later", "queue_full", _RETRY_SECONDS)
        entry.on(EntryEvent.QUEUE)
        self._queue.add(entry)
        return entry

    def _displace(self, entry: QueueEntry) -> bool:
        """Refuse the newest request of a lower priority than that of `entry`; return whether there was one."""
        displaced = next(self._queue.newest_below(entry.priority), None)
        if displaced is None:
            return False
        self._queue.remove(displaced)
        displaced.on(EntryEvent.REFUSE)
        return True

    def release(self) -> QueueEntry | None:
        """Return the next request, which passes now; `None` if none waits."""
        entry = self._queue.next()
        if entry is None:
            return None
        self._queue.begin(entry)
        entry.on(EntryEvent.DISPATCH)
        return entry

    def end(self, entry: QueueEntry) -> None:
        """Note that a request that waited has ended, or has left the queue: its wait is over or its client is gone."""
        if entry.state is EntryState.DISPATCHED:
            entry.on(EntryEvent.END)
            self._queue.end(entry, entry.cost)
        elif entry.state is EntryState.QUEUED:
            entry.on(EntryEvent.EXPIRE)
            self._queue.remove(entry)
