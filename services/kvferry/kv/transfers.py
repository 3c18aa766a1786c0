"""The decode side of a hand-off: one attempt to fetch one ticket's pages.

    QUEUED      other transfers go first                    may fail at once: nothing is in flight
    CONNECTING  learning where the peer's pages are         likewise
    CLAIMING    asking the peer to hold the pages           likewise; skipped for a ticket whose pages nobody holds
    READING     the transport writes into our pages
    VERIFYING   data is here; the peer's epochs are read back *after* it and compared with the ticket's
    READY       equal: the KV is what was promised
    DRAINING    something failed; the transport may still write, so the pages are not ours to reuse yet
    FAILED      nothing touches the pages any more; the tokens will be computed instead

Pages leave the writer's hands only in READY and FAILED. A wait that ends is not the same as a write that
ends: releasing a transport's handle stops the wait, so DRAINING lasts until the transport itself says so.
`attempt.Attempt` walks this table.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvferry.core.states import Machine


class TransferState(StrEnum):
    """Where an attempt stands."""

    QUEUED = "queued"
    CONNECTING = "connecting"
    CLAIMING = "claiming"
    READING = "reading"
    VERIFYING = "verifying"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class TransferEvent(StrEnum):
    """What can happen to an attempt."""

    BEGIN = "begin"
    """Its turn has come."""
    CONNECTED = "connected"
    OPEN = "open"
    """Connected, and there is nothing to claim: the ticket's pages are not held, its epochs are the whole proof."""
    CLAIMED = "claimed"
    REFUSED = "refused"
    """The peer said no, or nothing in time."""
    READ_DONE = "read_done"
    READ_BROKE = "read_broke"
    EPOCHS_EQUAL = "epochs_equal"
    EPOCHS_DIFFER = "epochs_differ"
    GIVE_UP = "give_up"
    """Deadline, stall, or the request was cancelled."""
    QUIET = "quiet"
    """The transport reports that it is finished with our pages."""


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
        (TransferState.VERIFYING, TransferEvent.READ_BROKE): TransferState.DRAINING,
        (TransferState.VERIFYING, TransferEvent.GIVE_UP): TransferState.DRAINING,
        (TransferState.DRAINING, TransferEvent.QUIET): TransferState.FAILED,
    },
)


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """How long a fetch may take, in seconds, before computing is the better way."""

    control_seconds: float = 2.0
    """One control message to the peer (describe, claim, renew, finish)."""
    least_seconds: float = 0.25
    """No transfer is given up earlier than this."""
    slack: float = 4.0
    """Multiple of the expected duration that is waited for."""
    assumed_bytes_per_second: float = 100e6
    """Expected rate, deliberately low: a busy machine, a TCP link."""
    stall_seconds: float = 2.0
    """A read that says how far it came, and came no further for so long, is given up."""
    queue_seconds: float = 5.0
    """A job that waited so long for its turn is given up before it begins."""

    def deadline_seconds(self, num_bytes: int) -> float:
        """max(least, slack x bytes / rate)."""
        return max(self.least_seconds, self.slack * num_bytes / self.assumed_bytes_per_second)
