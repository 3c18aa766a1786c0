"""The capacity of the fleet for this gateway's requests, from what the workers report.

A worker has room for `max_sequences` sequences, less those of other gateways. A worker whose KV blocks are nearly all
in use has room only for the sequences that this gateway already has there: further ones would wait for blocks, or
preempt running ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass

MAX_KV_USAGE = 0.95
"""Fraction of a worker's KV blocks in use from which on it gets no further sequences; evictable blocks are not in
use."""
PREFILL_TOKENS_PER_WORKER = 16_384
"""Prompt tokens per worker that may wait for their computation at a time. Workers compute prompts in order of arrival;
more tokens than keep them busy would only move the queue to where it has no fairness. Eight steps of the default token
budget."""
UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class WorkerRoom:
    """The state of one worker that accepts requests, at its last status."""

    role: str
    max_sequences: int
    """Maximum number of sequences in the running batch; 0 if the worker does not report it."""
    num_sequences: int
    """Number of sequences on the worker: running, waiting and loading."""
    in_flight: int
    """Number of these that are this gateway's, at the time of the status."""
    kv_usage: float
    """Fraction of the KV blocks in use, 0 to 1."""

    @property
    def is_full(self) -> bool:
        """Whether the KV blocks are nearly all in use by sequences that will free them."""
        return self.kv_usage >= MAX_KV_USAGE and self.num_sequences > 0

    @property
    def sequences(self) -> int:
        """Number of sequences of this gateway that the worker has room for, including those that it has."""
        if self.is_full:
            return self.in_flight
        if not self.max_sequences:
            return UNBOUNDED
        return max(0, self.max_sequences - max(0, self.num_sequences - self.in_flight))


@dataclass(frozen=True, slots=True)
class Room:
    """Bounds on this gateway's dispatched requests, together. A request is dispatched while the dispatched ones are
    below the bounds on sequences and prefill tokens, so that its own size may exceed what is left."""

    sequences: int = UNBOUNDED
    """Number of sequences on the fleet."""
    prefill_tokens: int = UNBOUNDED
    """Prompt tokens whose first output tokens have not arrived."""
    streams: int = UNBOUNDED
    """Maximum number of samples in flight; the samples of a request are included, unless it is the only one."""


CLOSED = Room(0, 0, 0)
"""No request is dispatched."""


def room(workers: Iterable[WorkerRoom], max_streams: int) -> Room:
    """Return the bounds that the workers which accept requests set.

    Workers of role `both` count only if there is no pair of a prefill and a decode worker, since only then they are
    routed to. Without workers there are no bounds other than `max_streams`: the dispatcher reports the reason.
    """
    by_role: dict[str, list[WorkerRoom]] = {"prefill": [], "decode": [], "both": []}
    for worker in workers:
        by_role[worker.role].append(worker)
    is_split = bool(by_role["prefill"] and by_role["decode"])
    generating = by_role["decode"] if is_split else by_role["both"] or by_role["decode"]
    computing = by_role["prefill"] if is_split else by_role["both"] or by_role["prefill"] or by_role["decode"]
    if not computing:
        return Room(streams=max_streams)
    most = min(UNBOUNDED, sum(worker.sequences for worker in generating or computing))
    first = min(UNBOUNDED, sum(worker.sequences for worker in computing))
    # Every sequence ends on a worker that generates, so that the bound of those workers is the one of the fleet.
    return Room(most if first else 0, PREFILL_TOKENS_PER_WORKER * len(computing), max_streams)
