"""Transfer state machine, the decode side of a hand-off: states and time limits of one attempt to read a ticket.

    QUEUED      waits for a fetch thread                    on failure FAILED: no read is in flight
    CONNECTING  requests the address of the peer's pages    on failure FAILED
    CLAIMING    requests a lease from the peer              on failure FAILED; skipped for a ticket without an offer
    READING     the transport writes to the target pages
    VERIFYING   data has arrived; the peer's epochs are read *after* it and compared with those in the ticket
    READY       epochs are equal: the KV is verified
    DRAINING    the attempt failed; the transport may still write to the pages, so they must not be reused yet
    FAILED      the transport no longer accesses the pages; the tokens are computed instead

The pages' writer count is decremented only in READY and FAILED. Releasing a transport's handle ends the wait, but not
the write, so DRAINING lasts until the transport reports that it is quiet. `attempt.Attempt` runs this state machine.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvferry.core.states import Machine


class TransferState(StrEnum):
    """State of an attempt to read a ticket's pages."""

    QUEUED = "queued"
    CONNECTING = "connecting"
    CLAIMING = "claiming"
    READING = "reading"
    VERIFYING = "verifying"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class TransferEvent(StrEnum):
    """Event in an attempt to read a ticket's pages."""

    BEGIN = "begin"
    """A fetch thread is available."""
    CONNECTED = "connected"
    OPEN = "open"
    """Connected for a ticket without an offer: the pages are not held, and only epochs verify them."""
    CLAIMED = "claimed"
    REFUSED = "refused"
    """The peer rejected the request, or did not answer in time."""
    READ_DONE = "read_done"
    READ_BROKE = "read_broke"
    EPOCHS_EQUAL = "epochs_equal"
    EPOCHS_DIFFER = "epochs_differ"
    DIGESTS_DIFFER = "digests_differ"
    """The digests of the data differ from the ticket's digests; occurs only if the ticket has digests."""
    GIVE_UP = "give_up"
    """The deadline passed, the read stalled, or the request was cancelled."""
    QUIET = "quiet"
    """The transport no longer accesses the target pages."""


TRANSFER_MACHINE = Machine(
    name="transfer",
    initial=TransferState.QUEUED,
    final=frozenset({TransferState.READY, TransferState.FAILED}),
    table={
        (TransferState.QUEUED, TransferEvent.BEGIN): TransferState.CONNECTING,
        (TransferState.QUEUED, TransferEvent.GIVE_UP): TransferState.FAILED,
        (TransferState.CONNECTING, TransferEvent.CONNECTED): TransferState.CLAIMING,
        (TransferState.CONNECTING, TransferEvent.OPEN): TransferState.READING,
        (TransferState.CONNECTING, TransferEvent.REFUSED): TransferState.FAILED,
        (TransferState.CONNECTING, TransferEvent.GIVE_UP): TransferState.FAILED,
        (TransferState.CLAIMING, TransferEvent.CLAIMED): TransferState.READING,
        (TransferState.CLAIMING, TransferEvent.REFUSED): TransferState.FAILED,
        (TransferState.CLAIMING, TransferEvent.GIVE_UP): TransferState.FAILED,
        (TransferState.READING, TransferEvent.READ_DONE): TransferState.VERIFYING,
        (TransferState.READING, TransferEvent.READ_BROKE): TransferState.DRAINING,
        (TransferState.READING, TransferEvent.GIVE_UP): TransferState.DRAINING,
        (TransferState.VERIFYING, TransferEvent.EPOCHS_EQUAL): TransferState.READY,
        (TransferState.VERIFYING, TransferEvent.EPOCHS_DIFFER): TransferState.DRAINING,
        (TransferState.VERIFYING, TransferEvent.DIGESTS_DIFFER): TransferState.DRAINING,
        (TransferState.VERIFYING, TransferEvent.READ_BROKE): TransferState.DRAINING,
        (TransferState.VERIFYING, TransferEvent.GIVE_UP): TransferState.DRAINING,
        (TransferState.DRAINING, TransferEvent.QUIET): TransferState.FAILED,
    },
)


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """Time limits of a fetch, in seconds. A fetch that exceeds a limit fails, and its tokens are computed."""

    control_seconds: float = 2.0
    """Time-out of a control message to the peer (describe, claim, renew, finish)."""
    min_seconds: float = 0.25
    """Minimum time limit of a transfer."""
    slack: float = 4.0
    """Time limit of a transfer as a multiple of its expected duration."""
    assumed_bytes_per_second: float = 100e6
    """Expected transfer rate in bytes per second; deliberately low, as on a busy machine or a slow TCP link."""
    stall_seconds: float = 2.0
    """Time without progress after which a read that reports progress is abandoned."""
    queue_seconds: float = 5.0
    """Time in the queue after which a job is abandoned before it starts."""

    def deadline_seconds(self, num_bytes: int) -> float:
        """Return the time limit for a transfer of `num_bytes` in seconds: max(minimum, slack x bytes / rate)."""
        return max(self.min_seconds, self.slack * num_bytes / self.assumed_bytes_per_second)
