"""Manages the offers of a prefill worker: seals tickets, applies the timeouts of offers and leases, frees exports."""

import asyncio
from dataclasses import dataclass

from kvferry.core.clock import Clock
from kvferry.core.ids import TicketId, new_ticket_id
from kvferry.engine.schedule.step.kv_jobs import Export
from kvferry.kv.handoff.offers import OfferBook, OfferState, OfferTimes
from kvferry.kv.interface.connector import Transport
from kvferry.kv.interface.ticket import Keyring, Ticket, digest_tokens
from kvferry.workers.calls.context import WorkerContext

_TICK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Offered:
    """A sealed ticket and the id by which the gateway can release it."""

    ticket_id: TicketId
    sealed: bytes


class OfferDesk:
    """Owns all exports once the engine has created them, together with their offers. Used only on the event loop's
    thread."""

    def __init__(self, context: WorkerContext, keyring: Keyring, times: OfferTimes, transport: Transport) -> None:
        """
        Args:
            context: identity, layout and clock of the worker.
            keyring: seals the tickets.
            times: durations of offers and leases.
            transport: transport of the pages; `Transport.attend` is set while an offer is open.
        """
        self._context = context
        self._keyring = keyring
        self._times = times
        self._clock: Clock = context.clock
        self._transport = transport
        self._book: OfferBook[int] = OfferBook(times)

    def offer(
        self,
        number: int,
        export: Export,
        tokens: list[int],
        scope: str,
        ticket_id: TicketId | None = None,
        *,
        readers: int = 1,
        digests: tuple[bytes, ...] = (),
    ) -> Offered:
        """Offer the pages of an export.

        Args:
            number: number of the export in the engine.
            export: pages and epochs.
            tokens: token ids of the prompt, whose digest is in the ticket.
            scope: cache scope of the prompt.
            ticket_id: id chosen by the gateway; a new one is chosen if it is `None`, or if an open offer has it.
            readers: number of readers, numbered from 0.
            digests: digest of each page; empty if readers do not verify contents.
        """
        if ticket_id is None or ticket_id in self._book:
            ticket_id = new_ticket_id()
        ticket = Ticket(
            ticket_id=ticket_id,
            worker_id=self._context.worker_id,
            incarnation=self._context.incarnation,
            control_address=self._context.address,
            connector=self._context.connector,
            fingerprint=self._context.layout.fingerprint,
            scope=scope,
            tokens_digest=digest_tokens(tokens),
            num_tokens=export.num_tokens,
            block_ids=export.blocks,
            epochs=export.epochs,
            expires_wall=self._clock.wall() + self._times.offer_seconds,
            readers=readers,
            layout=self._context.layout.description,
            digests=digests,
        )
        self._transport.attend(True)
        self._give_back(self._book.offer(ticket.id, number, self._clock.monotonic(), readers=readers))
        return Offered(ticket.id, self._keyring.seal(ticket))

    def claim(self, ticket_id: TicketId, attempt: int, reader: int = 0) -> float:
        """Claim an offer for a reader and return the lease in seconds; see `OfferBook.claim`."""
        return self._book.claim(ticket_id, attempt, self._clock.monotonic(), reader=reader)

    def renew(self, ticket_id: TicketId, attempt: int, reader: int = 0) -> float:
        """Renew a reader's lease and return it in seconds; see `OfferBook.renew`."""
        return self._book.renew(ticket_id, attempt, self._clock.monotonic(), reader=reader)

    def finish(self, ticket_id: TicketId, attempt: int, reader: int = 0, *, done: bool) -> None:
        """End a reader's lease; free the export after the last reader. See `OfferBook.finish`.

        Args:
            ticket_id: id of the ticket; unknown ids are ignored.
            attempt: number of the attempt; attempts without the lease are ignored.
            reader: index of the reader among the ticket's readers.
            done: whether the reader has every block.
        """
        self._give_back(self._book.finish(ticket_id, attempt, self._clock.monotonic(), done=done, reader=reader))

    def release(self, ticket_id: TicketId) -> None:
        """Withdraw an offer and free its export; see `OfferBook.release`."""
        self._give_back(self._book.release(ticket_id, self._clock.monotonic()))

    def count(self, state: OfferState) -> int:
        """Return the number of reader claims on offers that are in the given state."""
        return self._book.count(state)

    @property
    def is_idle(self) -> bool:
        """Whether no offer is open."""
        return self._book.is_idle

    async def run(self) -> None:
        """Apply the timeouts of offers and leases until cancelled, then free all exports."""
        try:
            while True:
                await asyncio.sleep(_TICK_SECONDS)
                self._give_back(self._book.expire(self._clock.monotonic()))
        finally:
            self._give_back(self._book.drop_all())

    def _give_back(self, numbers: list[int]) -> None:
        for number in numbers:
            self._context.loop.release_export(number)
        if numbers and self._book.is_idle:
            self._transport.attend(False)
