"""What a request owes, state by state: whom to cancel and what to release when it ends there.

A sample passes through here once per attempt to serve it. Whatever ends it (the client leaves, a deadline, an
error, success), `DUTIES` of the state it was in says what must still be done, so no exit can forget a ticket.
"""

from collections.abc import Mapping
from enum import StrEnum

from kvferry.core.states import Machine


class State(StrEnum):
    """Where a sample is."""

    QUEUED = "queued"
    """No worker holds anything for it: before the first attempt, or between two."""
    PREFILLING = "prefilling"
    OFFERED = "offered"
    """A prefill worker keeps blocks for it under a ticket; nobody reads them yet."""
    FETCHING = "fetching"
    """A decode worker has the ticket; whether it needs the blocks any more is not known."""
    DECODING = "decoding"
    """A decode worker generates; no ticket is out."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Event(StrEnum):
    """What happens to a sample."""

    CALL_PREFILL = "call_prefill"
    OFFER = "offer"
    """The prefill worker answered with a ticket."""
    CALL_DECODE = "call_decode"
    FETCH = "fetch"
    """The decode worker has read the blocks and finished the ticket."""
    LOSE = "lose"
    """The call in flight failed; what it held is the failed worker's to free."""
    DROP = "drop"
    """The ticket is given up: released, or refused by the decode worker."""
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"


class Duty(StrEnum):
    """What is owed to a worker."""

    CANCEL_PREFILL = "cancel_prefill"
    CANCEL_DECODE = "cancel_decode"
    RELEASE_TICKET = "release_ticket"


_LIVE = (State.QUEUED, State.PREFILLING, State.OFFERED, State.FETCHING, State.DECODING)

MACHINE: Machine[State, Event] = Machine(
    name="sample",
    initial=State.QUEUED,
    final=frozenset({State.DONE, State.FAILED, State.CANCELLED}),
    table={
        (State.QUEUED, Event.CALL_PREFILL): State.PREFILLING,
        (State.QUEUED, Event.CALL_DECODE): State.DECODING,
        (State.PREFILLING, Event.OFFER): State.OFFERED,
        (State.PREFILLING, Event.LOSE): State.QUEUED,
        (State.OFFERED, Event.CALL_DECODE): State.FETCHING,
        (State.OFFERED, Event.DROP): State.QUEUED,
        (State.FETCHING, Event.FETCH): State.DECODING,
        (State.FETCHING, Event.DROP): State.DECODING,
        (State.FETCHING, Event.LOSE): State.OFFERED,
        (State.DECODING, Event.LOSE): State.QUEUED,
        # Ends. QUEUED finishes when a stream is lost after its last token.
        **{(state, Event.FINISH): State.DONE for state in _LIVE if state is not State.OFFERED},
        **{(state, Event.FAIL): State.FAILED for state in _LIVE},
        **{(state, Event.CANCEL): State.CANCELLED for state in _LIVE},
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
"""In this order: a reader is stopped before what it reads is released."""
