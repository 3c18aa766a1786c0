"""Causes for which tokens of a prompt are computed, as metrics, requests' records and documents name them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class ComputeCause(StrEnum):
    """Why a worker computed the KV of a prompt's token, instead of reading it from a cache. Each computed token has one
    cause."""

    FIRST_SEEN = "first_seen"
    """The worker neither has the token's block nor remembers to have removed it."""
    EVICTED = "evicted"
    """The worker had the block, and its pages were reused for other prompts."""
    DROPPED = "dropped"
    """The worker had the block and removed it: the cache was emptied, the weights changed, or a step failed."""
    ON_ANOTHER_WORKER = "on_another_worker"
    """As `FIRST_SEEN`, but the gateway's exact map had the block on a worker that the route did not choose."""
    PARTIAL_BLOCK = "partial_block"
    """The token is in the prompt's last block, which is computed in any case: it is not full, or it has the last token,
    whose row gives the first output token."""
    ROWS_REQUESTED = "rows_requested"
    """The request asks for log-probabilities or a vector that needs the token's row."""
    LOAD_FAILED = "load_failed"
    """A load of the token's KV from a worker or a tier failed or could not start."""
    LOAD_DEARER = "load_dearer"
    """The token's KV could be loaded, and computing was estimated to be faster."""
    RESUMED = "resumed"
    """The request continued on this worker without the KV of the worker that had computed its prompt."""
    PREEMPTED = "preempted"
    """The token had KV on this worker for this request before: the sequence was preempted, or the weights changed."""


CAUSE_HELP: Mapping[ComputeCause, str] = {
    ComputeCause.FIRST_SEEN: "blocks that the worker has not seen",
    ComputeCause.EVICTED: "blocks whose pages were reused",
    ComputeCause.DROPPED: "blocks removed with the cache or with earlier weights",
    ComputeCause.ON_ANOTHER_WORKER: "blocks that another worker had",
    ComputeCause.PARTIAL_BLOCK: "the last block, which is always computed",
    ComputeCause.ROWS_REQUESTED: "rows for log-probabilities or a vector",
    ComputeCause.LOAD_FAILED: "KV whose load failed",
    ComputeCause.LOAD_DEARER: "KV that is loaded more slowly than computed",
    ComputeCause.RESUMED: "requests moved from another worker",
    ComputeCause.PREEMPTED: "computed again on the same worker",
}
"""A short description of each cause."""

AGAIN = frozenset({ComputeCause.PREEMPTED})
"""Causes of tokens that were counted before, by their first source. Without these, the tokens of a prompt that a worker
computed, found in its cache and loaded are the prompt's length."""


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """Number of tokens of a prompt that were computed for one cause."""

    cause: ComputeCause
    num_tokens: int
    seconds: float = 0.0
    """For `EVICTED`, the seconds since the first missing block was evicted, in whole seconds; 0 for other causes."""
