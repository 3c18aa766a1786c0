"""Where the KV of earlier turns may still be, so that the next turn's prefill can read it instead of computing it.

A decode worker that ends a stream gives a ticket for the blocks it leaves behind: the prompt *and* what it generated,
which no prefill worker ever had. Nothing holds them there; the ticket is a hint that whoever reads proves or drops. The
gateway remembers hints by the name of their last block and finds the longest that a new prompt begins with.
"""

from collections import OrderedDict
from dataclasses import dataclass

from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import BlockHash, Incarnation
from kvferry.gateway.fleet import Fleet
from kvferry.gateway.routing import Pick
from kvferry.gateway.trip import Trip

_MAX_TURNS = 4096


@dataclass(frozen=True, slots=True)
class _Turn:
    address: str
    """Of the worker that has the blocks."""
    incarnation: Incarnation
    sealed: bytes


class Turns:
    """The hints of one gateway. Used on the event loop's thread only."""

    def __init__(self, fleet: Fleet, block_tokens: int) -> None:
        self._fleet = fleet
        self._block_tokens = block_tokens
        self._turns: OrderedDict[BlockHash, _Turn] = OrderedDict()

    def remember(self, trip: Trip, address: str, sealed: bytes, num_tokens: int) -> None:
        """A stream has ended at `address`, which left the blocks of its first `num_tokens` tokens."""
        view = self._fleet.view(address)
        names = self._namer(trip).chain(trip.token_ids[:num_tokens])
        if not names or view is None or view.incarnation is None:
            return
        self._turns[names[-1]] = _Turn(address, view.incarnation, sealed)
        self._turns.move_to_end(names[-1])
        if len(self._turns) > _MAX_TURNS:
            self._turns.popitem(last=False)

    def find(self, trip: Trip, pick: Pick) -> bytes:
        """A ticket for the longest earlier turn that this prompt goes on from and `pick` could read; or nothing."""
        if not self._turns:
            return b""
        for name in reversed(self._namer(trip).chain(trip.request.token_ids[:-1])):
            turn = self._turns.get(name)
            if turn is None:
                continue
            view = self._fleet.view(turn.address)
            if view is None or not view.takes_work or view.incarnation != turn.incarnation:
                del self._turns[name]  # it restarted, or may not answer: waiting for it would cost more than it saves
                continue
            if view.as_replica().fingerprint == pick.replica.fingerprint:
                return turn.sealed
        return b""

    def _namer(self, trip: Trip) -> BlockNamer:
        return BlockNamer(tenant=trip.request.tenant.encode(), fingerprint=b"turn", block_tokens=self._block_tokens)
