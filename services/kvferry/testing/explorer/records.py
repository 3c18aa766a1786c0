"""What a decode worker keeps for a request, a load and a read: plain values."""

from typing import NamedTuple

from kvferry.core.ids import BlockId
from kvferry.kv.attempt import Attempt
from kvferry.kv.connector import FetchSource

Content = tuple[object, ...]
CallKey = tuple[int, int]
"""A request and which of the gateway's calls for it."""
STRAY: Content = ("left over from a read that was given up",)


class Request(NamedTuple):
    """One request in this worker."""

    caller_life: int
    source: FetchSource | None
    """What may still be tried."""
    had_ticket: bool
    pages: tuple[BlockId, ...] = ()
    state: str = "waiting"
    is_loaded: bool = False


class Read(NamedTuple):
    """What the transport does for one job; it goes on whatever becomes of the job."""

    local: tuple[BlockId, ...] = ()
    remote: tuple[int, ...] = ()
    life: int = 0
    """Of the peer."""
    key: tuple[int, int] = (-1, -1)
    next: int = 0
    """Index of the page that lands next; all pages: the epochs are due."""
    late: bool = False
    """Time may pass before it goes on."""
    is_broken: bool = False
    """Its source is gone; one more write may be on its way."""
    is_over: bool = False
    """Every page has landed, or the transport has let go."""
    wants_epochs: bool = False


class Load(NamedTuple):
    """One job."""

    key: CallKey
    attempt: Attempt
