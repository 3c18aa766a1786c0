"""Immutable records of a modeled decode worker: requests, loads, reads."""

from typing import NamedTuple

from kvferry.core.ids import BlockId
from kvferry.kv.handoff.attempt import Attempt
from kvferry.kv.interface.connector import FetchSource

Content = tuple[object, ...]
CallKey = tuple[int, int]
"""(request number, number of the gateway's call for this request)."""
STRAY: Content = ("left over from an abandoned read",)


class Request(NamedTuple):
    """A request on a decode worker."""

    caller_life: int
    source: FetchSource | None
    """The offer that may still be fetched; `None` if there is no such offer."""
    had_ticket: bool
    pages: tuple[BlockId, ...] = ()
    state: str = "waiting"
    is_loaded: bool = False


class Read(NamedTuple):
    """Progress of the transport's read for a job; the read continues even if the job has ended."""

    local: tuple[BlockId, ...] = ()
    remote: tuple[int, ...] = ()
    life: int = 0
    """Incarnation of the peer."""
    key: tuple[int, int] = (-1, -1)
    next: int = 0
    """Index of the next page to copy; after the last page, the epochs are read."""
    late: bool = False
    """Whether time may pass before the read continues."""
    is_broken: bool = False
    """Whether the peer has crashed; one more write may be in flight."""
    is_over: bool = False
    """Whether all pages were copied, or the transport has ended the read."""
    wants_epochs: bool = False


class Load(NamedTuple):
    """The attempt of a job and the request to which it belongs."""

    key: CallKey
    attempt: Attempt
