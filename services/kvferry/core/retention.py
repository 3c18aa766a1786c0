"""Hints of clients about the cache: what they ask of it, and what a worker granted."""

from dataclasses import dataclass
from enum import StrEnum

MAX_RETENTION_SECONDS = 24 * 3600.0
"""Longest retention; longer ones are granted for this time."""


@dataclass(frozen=True, slots=True)
class CacheHints:
    """What a client asks of the cache. Hints change no answer and are never a reason to refuse a request."""

    retain_seconds: float = 0.0
    """Time for which the prompt's KV is kept after it was computed, in seconds; 0 for no retention."""
    affinity_key: str = ""
    """Requests of a tenant with equal keys go to one worker while its load permits, if no worker has their prompts
    cached; empty to go by the beginning of the prompt."""


NO_HINTS = CacheHints()


class RetentionOutcome(StrEnum):
    """What became of a retention."""

    RETAINED = "retained"
    """The blocks are kept until the time to live ends."""
    QUOTA = "quota"
    """The tenant's share, or that of all tenants, does not suffice."""
    OFF = "off"
    """The worker retains nothing (`--retention-share 0`)."""
    SHORT = "short"
    """The prompt has no full block."""
    EVICTED = "evicted"
    """The blocks left the cache before they could be kept."""
    DRAINING = "draining"
    """The worker drains."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The answer of a worker to a request that asked for retention."""

    outcome: RetentionOutcome
    num_tokens: int = 0
    """Number of leading tokens of the prompt whose KV is kept."""
    seconds: float = 0.0
    """Time for which it is kept, in seconds from the end of the prompt's computation."""
    expires_at: float = 0.0
    """End of the time to live, Unix seconds on the gateway's clock; 0 if unknown."""
