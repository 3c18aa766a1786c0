"""Tickets for the KV of prior turns, so that the next turn's prefill reads this KV instead of recomputing it.

At the end of a stream a decode worker returns a ticket for the blocks that stay in its cache. They cover the prompt and
the generated tokens; no prefill worker has the KV of generated tokens. The ticket pins no pages; the reader verifies
their epochs. The gateway stores tickets by the hash of their last block and looks up the longest prefix of a new
prompt.
"""

from collections import OrderedDict
from dataclasses import dataclass

from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import BlockHash, Incarnation
from kvferry.gateway.decide.lifecycle.sample_run import SampleRun
from kvferry.gateway.decide.routing.cached_prefix import block_names
from kvferry.gateway.decide.routing.routes import Pick
from kvferry.gateway.fleet.fleet import Fleet

_MAX_TURNS = 4096


@dataclass(frozen=True, slots=True)
class _Turn:
    address: str
    """Address of the worker that has the blocks."""
    incarnation: Incarnation
    sealed: bytes


class Turns:
    """The prior-turn tickets of one gateway. Used on the event loop's thread only."""

    def __init__(self, fleet: Fleet, namers: BlockNamers) -> None:
        self._fleet = fleet
        self._namers = namers
        self._turns: OrderedDict[BlockHash, _Turn] = OrderedDict()

    def remember(self, run: SampleRun, address: str, sealed: bytes, num_tokens: int) -> None:
        """Store the ticket of a stream that has ended; it replaces the ticket of an equal prefix.

        Args:
            run: the sample, with its prompt and output.
            address: address of the worker that has the blocks.
            sealed: the ticket.
            num_tokens: number of leading tokens that the ticket covers.
        """
        view = self._fleet.view(address)
        if view is None or view.incarnation is None:
            return
        names = block_names(self._namers, run.request.caller.scope, view.as_replica(), run.token_ids[:num_tokens])
        if not names:
            return
        self._turns[names[-1]] = _Turn(address, view.incarnation, sealed)
        self._turns.move_to_end(names[-1])
        if len(self._turns) > _MAX_TURNS:
            self._turns.popitem(last=False)

    def clear(self) -> None:
        """Drop all tickets."""
        self._turns.clear()

    def find(self, run: SampleRun, pick: Pick) -> bytes:
        """Return the ticket of the longest prior turn that is a prefix of the prompt and that `pick` can read; empty if
        there is no such turn.

        Args:
            run: the sample.
            pick: worker that will read the KV.
        """
        if not self._turns:
            return b""
        request = run.request
        names = run.names.of(
            self._namers, request.caller.scope, pick.replica, request.token_ids[:-1], len(request.token_ids)
        )
        for name in reversed(names):
            turn = self._turns.get(name)
            if turn is None:
                continue
            view = self._fleet.view(turn.address)
            if view is None or not view.takes_work or view.incarnation != turn.incarnation:
                del self._turns[name]  # restarted or suspect: waiting for the worker would cost more than recomputing
                continue
            if view.as_replica().fingerprint == pick.replica.fingerprint:
                return turn.sealed
        return b""
