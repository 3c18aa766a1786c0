"""The states of a sample, and the clean-up that is required when the sample ends in each state.

A sample passes through these states once per attempt. On every exit (client disconnect, deadline, error, success),
`DUTIES[state]` lists the remaining clean-up, so that no exit leaks a ticket.
"""

from collections.abc import Mapping
from enum import StrEnum

from kvferry.core.states import Machine


class State(StrEnum):
    """State of a sample at the gateway; transitions are in `MACHINE`."""

    QUEUED = "queued"
    """No worker has allocated resources for the sample: before the first attempt, or between two attempts."""
    PREFILLING = "prefilling"
    OFFERED = "offered"
    """A prefill worker has offered blocks for the sample under a ticket; no decode worker reads them yet."""
    FETCHING = "fetching"
    """A decode worker has the ticket and may still be reading the blocks."""
    DECODING = "decoding"
    """A decode worker generates tokens; the sample has no ticket."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class SampleEvent(StrEnum):
    """Event that changes a sample's state; transitions are in `MACHINE`."""

    CALL_PREFILL = "call_prefill"
    OFFER = "offer"
    """The prefill worker answered with a ticket."""
    CALL_DECODE = "call_decode"
    FETCH = "fetch"
    """The decode worker has read the blocks and finished the ticket."""
    LOSE = "lose"
    """The call in flight failed; its worker frees the resources of the call."""
    DROP = "drop"
    """The ticket was released, or rejected by the decode worker."""
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"


class Duty(StrEnum):
    """A clean-up action at a worker."""

    CANCEL_PREFILL = "cancel_prefill"
    CANCEL_DECODE = "cancel_decode"
    RELEASE_TICKET = "release_ticket"


_LIVE = (State.QUEUED, State.PREFILLING, State.OFFERED, State.FETCHING, State.DECODING)

MACHINE: Machine[State, SampleEvent] = Machine(
    name="sample",
    initial=State.QUEUED,
    final=frozenset({State.DONE, State.FAILED, State.CANCELLED}),
    table={
        (State.QUEUED, SampleEvent.CALL_PREFILL): State.PREFILLING,
        (State.QUEUED, SampleEvent.CALL_DECODE): State.DECODING,
        (State.PREFILLING, SampleEvent.OFFER): State.OFFERED,
        (State.PREFILLING, SampleEvent.LOSE): State.QUEUED,
        (State.OFFERED, SampleEvent.CALL_DECODE): State.FETCHING,
        (State.OFFERED, SampleEvent.DROP): State.QUEUED,
        (State.FETCHING, SampleEvent.FETCH): State.DECODING,
        (State.FETCHING, SampleEvent.DROP): State.DECODING,
        (State.FETCHING, SampleEvent.LOSE): State.OFFERED,
        (State.DECODING, SampleEvent.LOSE): State.QUEUED,
        # Final states. QUEUED can finish if the stream was lost after its last token.
        **{(state, SampleEvent.FINISH): State.DONE for state in _LIVE if state is not State.OFFERED},
        **{(state, SampleEvent.FAIL): State.FAILED for state in _LIVE},
        **{(state, SampleEvent.CANCEL): State.CANCELLED for state in _LIVE},
    },
)

DUTIES: Mapping[State, tuple[Duty, ...]] = {
    State.QUEUED: (),
    State.PREFILLING: (Duty.CANCEL_PREFILL,),
    State.OFFERED: (Duty.RELEASE_TICKET,),
    State.FETCHING: (Duty.CANCEL_DECODE, Duty.RELEASE_TICKET),
    State.DECODING: (Duty.CANCEL_DECODE,),
    State.DONE: (),
    State.FAILED: (),
    State.CANCELLED: (),
}
"""Required clean-up by state, in execution order: a reader is stopped before the pages that it reads are released."""
