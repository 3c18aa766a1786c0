"""The capacity of the fleet for this gateway's requests, from what the workers report.

A worker has room for `max_sequences` sequences, less those of other gateways. A worker whose KV blocks are nearly all
in use has room only for the sequences that this gateway already has there: further ones would wait for blocks, or
preempt running ones.

The rate at which the queue drains gives the time after which a refused client may retry.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

MAX_KV_USAGE = 0.95
"""Fraction of a worker's KV blocks in use at which it gets no further sequences; evictable blocks are not in use."""
PREFILL_TOKENS_PER_WORKER = 16_384
"""Maximum number of dispatched prompt tokens per worker that are not yet computed: eight steps of the default token
budget. Workers compute prompts in order of arrival; more tokens than needed to keep them busy would only move the queue
to the workers, where it is not fair between tenants."""
UNBOUNDED = 1 << 62
_MEMORY_SECONDS = 30.0
"""Time constant of the average, seconds."""
MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class WorkerRoom:
    """State of a worker that accepts requests, as of its last status."""

    role: str
    max_sequences: int
    """Maximum number of sequences in the running batch; 0 if the worker does not report it."""
    num_sequences: int
    """Number of sequences on the worker: running, waiting and loading."""
    in_flight: int
    """Number of these sequences that belong to this gateway, at the time of the status."""
    kv_usage: float
    """Fraction of the KV blocks in use, 0 to 1."""

    @property
    def is_full(self) -> bool:
        """Whether the KV blocks are nearly all in use by sequences that will free them."""
        return self.kv_usage >= MAX_KV_USAGE and self.num_sequences > 0

    @property
    def sequences(self) -> int:
        """Number of this gateway's sequences that the worker has room for, including those already on it."""
        if self.is_full:
            return self.in_flight
        if not self.max_sequences:
            return UNBOUNDED
        return max(0, self.max_sequences - max(0, self.num_sequences - self.in_flight))


@dataclass(frozen=True, slots=True)
class Room:
    """Bounds on all dispatched requests of this gateway together. A request is dispatched while earlier requests are
    below the bounds on sequences and prefill tokens; its own size may exceed the remainder."""

    sequences: int = UNBOUNDED
    """Maximum number of this gateway's sequences on the fleet."""
    searches: int = UNBOUNDED
    """Maximum number of beams of this gateway's searches: with prefill and decode workers, the sequences of the prefill
    workers, which compute all steps of searches; otherwise half of `sequences`."""
    is_split: bool = False
    """Whether searches do not use the workers of `sequences`, so that their beams are not counted there."""
    prefill_tokens: int = UNBOUNDED
    """Maximum number of prompt tokens of requests whose first output tokens have not arrived."""
    streams: int = UNBOUNDED
    """Maximum number of samples in flight, including those of the next request, unless no other request is in
    flight."""


CLOSED = Room(0, 0, False, 0, 0)
"""Bounds under which no requests are dispatched."""


def room(workers: Iterable[WorkerRoom], max_streams: int) -> Room:
    """Return the bounds that follow from the workers that accept requests.

    Workers of role `both` count only if there is no pair of a prefill and a decode worker, since only then requests are
    routed to them. Without workers, `max_streams` is the only bound, and the dispatcher reports why requests cannot be
    served.

    Args:
        workers: the workers that accept requests.
        max_streams: the gateway's bound on samples that run at a time.
    """
    generating, computing = _by_task(workers)
    if not computing:
        return Room(streams=max_streams)
    most = min(UNBOUNDED, sum(worker.sequences for worker in generating or computing))
    first = min(UNBOUNDED, sum(worker.sequences for worker in computing))
    is_split = computing is not generating and bool(generating)
    return Room(
        # Every sequence ends on a worker that generates, so these workers' bound is the bound of the fleet.
        sequences=most if first else 0,
        searches=first if is_split else (most + 1) // 2,
        is_split=is_split,
        prefill_tokens=PREFILL_TOKENS_PER_WORKER * len(computing),
        streams=max_streams,
    )


def step_slots(workers: Iterable[WorkerRoom]) -> int:
    """Return how many steps of beam searches may run on the workers at a time: half of the sequences of the workers
    that compute prompts, since these workers compute all steps. The other half remains for the prompts of other
    requests."""
    _, computing = _by_task(workers)
    return sum(worker.sequences for worker in computing) // 2


def _by_task(workers: Iterable[WorkerRoom]) -> tuple[list[WorkerRoom], list[WorkerRoom]]:
    """Return the workers that generate, and those that compute prompts; some may be in both lists."""
    by_role: dict[str, list[WorkerRoom]] = {"prefill": [], "decode": [], "both": []}
    for worker in workers:
        by_role[worker.role].append(worker)
    is_split = bool(by_role["prefill"] and by_role["decode"])
    generating = by_role["decode"] if is_split else by_role["both"] or by_role["decode"]
    computing = by_role["prefill"] if is_split else by_role["both"] or by_role["prefill"] or by_role["decode"]
    return generating, computing


class DrainRate:
    """Exponentially weighted rate of dispatched requests."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._updated = 0.0
        self._started: float | None = None

    def note(self, now: float) -> None:
        """Count one dispatched request at `now`, monotonic seconds."""
        if self._started is None:
            self._started = self._updated = now
        self._decay(now)
        self._weight += 1.0

    def per_second(self, now: float) -> float:
        """Return the rate in requests per second; 0 before the first dispatch.

        Args:
            now: monotonic seconds.
        """
        if self._started is None:
            return 0.0
        self._decay(now)
        # Normalize by the total exponential weight of the window since the first dispatch (minimum 1 s).
        age = max(1.0, now - self._started)
        return self._weight / (_MEMORY_SECONDS * (1.0 - math.exp(-age / _MEMORY_SECONDS)))

    def retry_after(self, num_ahead: int, now: float) -> float:
        """Return the time to dispatch `num_ahead` requests at the present rate in seconds, clamped to 1 to 60.

        Args:
            num_ahead: number of requests that are dispatched first.
            now: monotonic seconds.
        """
        rate = self.per_second(now)
        if rate <= 0.0:
            return MAX_RETRY_SECONDS
        return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, num_ahead / rate))

    def _decay(self, now: float) -> None:
        self._weight *= math.exp(-max(0.0, now - self._updated) / _MEMORY_SECONDS)
        self._updated = max(self._updated, now)
