"""The prefill worker's side of the hand-off: seals tickets, keeps the offer book, lets time act on it."""

import asyncio
from dataclasses import dataclass

from kvferry.core.clock import Clock
from kvferry.core.ids import TicketId, new_ticket_id
from kvferry.engine.jobs import Export
from kvferry.kv.connector import Transport
from kvferry.kv.offers import OfferBook, OfferState, OfferTimes
from kvferry.kv.ticket import Keyring, Ticket, digest_tokens
from kvferry.workers.context import WorkerContext

_TICK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Offered:
    """A sealed ticket and the name by which the gateway can release it."""

    ticket_id: TicketId
    sealed: bytes


class OfferDesk:
    """Owns every export from the moment the engine hands it over. Used on the event loop's thread only."""

    def __init__(self, context: WorkerContext, keyring: Keyring, times: OfferTimes, transport: Transport) -> None:
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
        tenant: str,
        ticket_id: TicketId | None = None,
        *,
        readers: int = 1,
    ) -> Offered:
        """Offer the pages of export `number` to whoever brings the ticket, `readers` of them at a time, under the id
        that the caller wished unless another offer has it."""
        if ticket_id is None or ticket_id in self._book:
            ticket_id = new_ticket_id()
        ticket = Ticket(
            ticket_id=ticket_id,
            worker_id=self._context.worker_id,
            incarnation=self._context.incarnation,
            control_address=self._context.address,
            connector=self._context.connector,
            fingerprint=self._context.layout.fingerprint,
            tenant=tenant,
            tokens_digest=digest_tokens(tokens),
            num_tokens=export.num_tokens,
            block_ids=export.blocks,
            epochs=export.epochs,
            expires_wall=self._clock.wall() + self._times.offer_seconds,
            readers=readers,
            layout=self._context.layout.description,
        )
        self._transport.attend(True)
        self._give_back(self._book.offer(ticket.id, number, self._clock.monotonic(), readers=readers))
        return Offered(ticket.id, self._keyring.seal(ticket))

    def claim(self, ticket_id: TicketId, attempt: int, reader: int = 0) -> float:
        """See `OfferBook.claim`."""
        return self._book.claim(ticket_id, attempt, self._clock.monotonic(), reader=reader)

    def renew(self, ticket_id: TicketId, attempt: int, reader: int = 0) -> float:
        """See `OfferBook.renew`."""
        return self._book.renew(ticket_id, attempt, self._clock.monotonic(), reader=reader)

    def finish(self, ticket_id: TicketId, attempt: int, reader: int = 0, *, done: bool) -> None:
        """See `OfferBook.finish`."""
        self._give_back(self._book.finish(ticket_id, attempt, self._clock.monotonic(), done=done, reader=reader))

    def release(self, ticket_id: TicketId) -> None:
        """See `OfferBook.release`."""
        self._give_back(self._book.release(ticket_id, self._clock.monotonic()))

    def count(self, state: OfferState) -> int:
        """Offers in one state."""
        return self._book.count(state)

    @property
    def is_idle(self) -> bool:
        """Whether no offer is left."""
        return self._book.is_idle

    async def run(self) -> None:
        """Let offers and leases run out, until cancelled; then give everything back."""
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
