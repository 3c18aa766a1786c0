"""Outcomes of a hand-off, as metrics, `/fleet`, the timing of a request and the operator name them."""

from enum import StrEnum


class HandoffOutcome(StrEnum):
    """What became of the KV of a prompt that one worker computed and another one needs."""

    NONE = "none"
    """The request had no ticket."""
    FETCHED = "fetched"
    """The blocks were read and verified."""
    LOCAL = "local"
    """The worker had all blocks in its own prefix cache."""
    TIER = "tier"
    """The blocks, or the first of them, came from a tier; no read from the peer was tried."""
    RECOMPUTED = "recomputed"
    """The worker computed the prompt, because that was faster than to read the blocks."""
    FAILED = "failed"
    """The read failed, or the offer had expired; the blocks came from a tier or were computed."""
    REJECTED = "rejected"
    """The decode worker did not accept the ticket; the request was sent again without it."""
    KEY_UNKNOWN = "key_unknown"
    """As `REJECTED`, because the decode worker does not have the key of the ticket."""


LOST = (HandoffOutcome.FAILED, HandoffOutcome.REJECTED, HandoffOutcome.KEY_UNKNOWN)
"""Outcomes of hand-offs that were attempted and did not take place."""
TRIED = (HandoffOutcome.FETCHED, *LOST)
"""Outcomes of hand-offs that were attempted; the share of `LOST` among them shows whether the transport works."""
