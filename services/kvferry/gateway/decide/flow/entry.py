"""A request in the flow controller: its cost, its place in the queue and its states."""

import math
from dataclasses import dataclass
from enum import StrEnum

from kvferry.core.states import Machine


class EntryState(StrEnum):
    """State of an entry; transitions are in `MACHINE`."""

    NEW = "new"
    QUEUED = "queued"
    DISPATCHED = "dispatched"
    """The request has left the queue and holds capacity."""
    ENDED = "ended"
    """The dispatched request has ended, in any way, and holds no capacity."""
    REFUSED = "refused"
    """The queue had no room for the request, or the request was displaced."""
    EXPIRED = "expired"
    """The deadline passed in the queue."""
    CANCELLED = "cancelled"
    """The client cancelled the request in the queue."""


class EntryEvent(StrEnum):
    """Event that changes an entry's state; transitions are in `MACHINE`."""

    QUEUE = "queue"
    DISPATCH = "dispatch"
    END = "end"
    REFUSE = "refuse"
    EXPIRE = "expire"
    CANCEL = "cancel"


MACHINE: Machine[EntryState, EntryEvent] = Machine(
    name="flow entry",
    initial=EntryState.NEW,
    final=frozenset({EntryState.ENDED, EntryState.REFUSED, EntryState.EXPIRED, EntryState.CANCELLED}),
    table={
        (EntryState.NEW, EntryEvent.QUEUE): EntryState.QUEUED,
        (EntryState.NEW, EntryEvent.REFUSE): EntryState.REFUSED,
        (EntryState.QUEUED, EntryEvent.DISPATCH): EntryState.DISPATCHED,
        (EntryState.QUEUED, EntryEvent.REFUSE): EntryState.REFUSED,
        (EntryState.QUEUED, EntryEvent.EXPIRE): EntryState.EXPIRED,
        (EntryState.QUEUED, EntryEvent.CANCEL): EntryState.CANCELLED,
        (EntryState.DISPATCHED, EntryEvent.END): EntryState.ENDED,
    },
)


@dataclass(slots=True, eq=False)
class Entry:
    """One request, with all of its prompts and samples. Everything except the fields at the end is constant."""

    tenant: str
    priority: int
    """Band of the request; lower numbers are served first."""
    cost: float
    """Expected number of tokens, uncached prompt tokens plus output tokens, over all samples; greater than 0."""
    num_sequences: int = 1
    """Maximum number of samples or beams that run at a time."""
    is_search: bool = False
    """Whether the request is a beam search; see `capacity.Room.searches`."""
    prefill_tokens: int = 1
    """Expected prompt tokens that are computed before the request's first tokens."""
    num_bytes: int = 0
    """Memory of the queued request in bytes."""
    weight: float = 1.0
    """Share of the tenant in its band, relative to other tenants; greater than 0."""
    deadline: float = math.inf
    """Monotonic seconds."""
    number: int = 0
    """Order of arrival, assigned by the controller."""
    arrived: float = 0.0
    """Time at which the request was queued, monotonic seconds."""
    state: EntryState = MACHINE.initial
    open_prefill_tokens: int = 0
    """Part of `prefill_tokens` that holds capacity."""

    def on(self, event: EntryEvent) -> None:
        """Apply `event`: change the state according to `MACHINE`.

        Raises:
            InvariantBroken: `event` is illegal in the current state.
        """
        self.state = MACHINE.next(self.state, event)
