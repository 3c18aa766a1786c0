"""Model of a prefill worker with the production offer book and block pool; the worker's services are replaced."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.explorer import copies, ledger
from harness.explorer.network import Message
from harness.explorer.scenario import FINGERPRINT, OFFER_TIMES, digest_of, page_digest
from harness.explorer.violation import Violation
from kvferry.core.errors import TicketRejected
from kvferry.core.ids import BlockId, TicketId
from kvferry.engine.schedule.blocks.block_pool import BlockPool
from kvferry.kv.handoff.offers import OfferBook, OfferState
from kvferry.kv.interface.ticket import Ticket

if TYPE_CHECKING:
    from harness.explorer.parts import Parts
    from harness.explorer.world import World

Content = tuple[object, ...]
CallKey = tuple[int, int]
"""(request number, number of the gateway's call for this request)."""


class Job(NamedTuple):
    """A prompt on this worker, from the call to the response."""

    ticket_id: str
    caller_life: int
    pages: tuple[BlockId, ...] = ()
    first_fresh: int = 0
    """Index of the first page that was not in the prefix cache."""
    is_computed: bool = False


class PrefillActor:
    """An incarnation of a prefill worker."""

    name = "P"

    def __init__(self, parts: "Parts", num_pages: int, life: int) -> None:
        self.life = life
        self.pool: BlockPool = parts.pool(num_pages, on_reuse=self._forget)
        self.book: OfferBook[str] = parts.book(OFFER_TIMES)
        self.memory: list[Content] = [()] * num_pages
        self.jobs: dict[CallKey, Job] = {}
        self.waiting: tuple[CallKey, ...] = ()
        self.cached: dict[Content, BlockId] = {}
        self.offered: dict[str, tuple[BlockId, ...]] = {}
        """Pages by ticket id; the offer book stores only the id."""
        self.accounts: dict[str, ledger.Account] = {}
        self.early: frozenset[str] = frozenset()
        """Ids of tickets that were released before they were offered."""

    @property
    def incarnation(self) -> str:
        return f"P{self.life}"

    def clone(self) -> "PrefillActor":
        """Return an independent copy."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.pool = copies.copy_pool(self.pool, made._forget)
        made.book = copies.copy_book(self.book)
        made.memory = self.memory[:]
        made.jobs = self.jobs.copy()
        made.cached = self.cached.copy()
        made.offered = self.offered.copy()
        made.accounts = self.accounts.copy()
        return made

    def state(self, now: float) -> tuple[object, ...]:
        """Return the part of the state that affects the future, with times relative to `now`."""
        accounts = tuple(
            (t, tuple((r.until - now, *r[1:]) for r in a.rows), a.released_at is not None and a.released_at - now)
            for t, a in sorted(self.accounts.items())
        )
        return (
            self.life,
            copies.pool_state(self.pool),
            copies.book_state(self.book, now),
            tuple(self.memory),
            tuple(sorted(self.jobs.items())),
            self.waiting,
            tuple(sorted(self.offered.items())),
            accounts,
            tuple(sorted(self.cached.items())),
            self.early,
        )

    # ------------------------------------------------------------------ inputs

    def receive(self, world: "World", message: Message) -> None:
        """Handle a message."""
        getattr(self, f"on_{message.kind}")(world, message)

    def on_prefill(self, world: "World", message: Message) -> None:
        key, ticket_id = message.body
        self.jobs[key] = Job(ticket_id, message.src_life)
        self.waiting = (*self.waiting, key)
        self.admit(world)

    def on_hangup(self, world: "World", message: Message) -> None:
        """Handle the caller's disconnect: abort its prompt; an offer that has already been made expires by its
        timer."""
        job = self.jobs.pop(message.body[0], None)
        if job is not None:
            self.waiting = tuple(k for k in self.waiting if k != message.body[0])
            self.pool.release(job.pages)
            self.admit(world)

    def on_release(self, world: "World", message: Message) -> None:
        ticket_id = str(message.body[0])
        if ticket_id in self.accounts:
            self.accounts[ticket_id] = ledger.released(self.accounts[ticket_id], world.now)
        else:
            self.early |= {ticket_id}
        self.give_back(world, self.book.release(TicketId(ticket_id), world.now))

    def on_describe(self, world: "World", message: Message) -> None:
        self._answer(world, message, "described", lambda: ())

    def on_claim(self, world: "World", message: Message) -> None:
        self._answer(world, message, "claimed", lambda: (self._lease(world, message, self.book.claim),))

    def on_renew(self, world: "World", message: Message) -> None:
        try:
            world.parts.check_incarnation(str(message.body[1]), self.incarnation)
            self._lease(world, message, self.book.renew)
        except TicketRejected:
            pass

    def on_finish(self, world: "World", message: Message) -> None:
        _, incarnation, ticket_id, attempt, reader, done = message.body
        try:
            world.parts.check_incarnation(str(incarnation), self.incarnation)
        except TicketRejected:
            return
        ticket_id = str(ticket_id)
        if ticket_id in self.accounts:
            self.accounts[ticket_id] = ledger.finished(
                self.accounts[ticket_id],
                reader,
                attempt,
                world.now,
                done=bool(done),
            )
        freed = self.book.finish(TicketId(ticket_id), attempt, world.now, done=bool(done), reader=reader)
        self.give_back(world, freed)

    @property
    def due(self) -> float:
        """Time of the next timer."""
        return self.book.due

    def tick(self, world: "World") -> None:
        """Run all timers that are due."""
        self.give_back(world, self.book.expire(world.now))
        lost = [a for a in self.accounts.values() if a.released_at is None and world.is_untouched()]
        if lost and self.book.count(OfferState.QUIESCE):
            raise Violation("a lease expired although no message was late")
        if self.book.due <= world.now:
            raise Violation(f"an offer of P is overdue at {world.now:g} although its timer has run")

    # ------------------------------------------------------------------ the worker's own steps

    def tasks(self) -> list[tuple[str, CallKey]]:
        """Return the steps that the worker can take without a message."""
        return [("answer" if job.is_computed else "compute", key) for key, job in self.jobs.items() if job.pages]

    def do(self, world: "World", what: str, key: CallKey) -> None:
        """Run one of `tasks`."""
        if what == "compute":
            self.compute(world, key)
        else:
            self.answer(world, key)

    def admit(self, world: "World") -> None:
        """Allocate pages to waiting prompts in order of arrival, as long as the pool has enough free pages."""
        while self.waiting:
            key = self.waiting[0]
            plan = world.plan(key)
            hit: list[BlockId] = []
            for i in range(plan.num_pages):
                page = self.cached.get(plan.content(i))
                if page is None:
                    break
                hit.append(page)
            hit = hit[: plan.num_pages - 1]
            self.pool.hold(hit)
            fresh = self.pool.allocate(plan.num_pages - len(hit))
            if fresh is None:
                self.pool.release(hit)
                return
            self.waiting = self.waiting[1:]
            self.jobs[key] = self.jobs[key]._replace(pages=(*hit, *fresh), first_fresh=len(hit))

    def compute(self, world: "World", key: CallKey) -> None:
        """Write the KV of a prompt's pages that were not cached."""
        job, plan = self.jobs[key], world.plan(key)
        for i in range(job.first_fresh, plan.num_pages):
            self.memory[job.pages[i]] = plan.content(i)
        self.jobs[key] = job._replace(is_computed=True)

    def answer(self, world: "World", key: CallKey) -> None:
        """Offer a prompt's pages and send the ticket."""
        job = self.jobs.pop(key)
        plan, held = world.plan(key), world.scenario.held
        for i, page in enumerate(job.pages):
            if self.memory[page] != plan.content(i):
                raise Violation(f"P offers {self.memory[page]} as page {i} of request {key[0]}")
        self.cached.update({plan.content(i): page for i, page in enumerate(job.pages)})
        if plan.path == "prefill":
            self.pool.release(job.pages)
            self.admit(world)
            world.send(Message("prefilled", self.name, self.life, "G", job.caller_life, (key, None)))
            return
        ticket = Ticket(
            ticket_id=job.ticket_id,
            worker_id=self.name,
            incarnation=self.incarnation,
            control_address=self.name,
            connector="memory",
            fingerprint=FINGERPRINT,
            scope=plan.tenant,
            tokens_digest=digest_of(plan.tokens),
            num_tokens=plan.num_pages,
            block_ids=job.pages,
            epochs=tuple(self.pool.epochs[b] for b in job.pages),
            expires_wall=world.now + OFFER_TIMES.offer_seconds,
            held=held,
            readers=world.scenario.readers,
            digests=tuple(page_digest(self.memory[b]) for b in job.pages) if world.scenario.digests else (),
        )
        if held:
            self.offered[job.ticket_id] = job.pages
            self.accounts[job.ticket_id] = ledger.opened(ticket.readers, world.now, job.ticket_id in self.early)
            freed = self.book.offer(TicketId(job.ticket_id), job.ticket_id, world.now, readers=ticket.readers)
            self.give_back(world, freed)
        else:
            self.pool.release(job.pages)
            self.admit(world)
        world.send(Message("prefilled", self.name, self.life, "G", job.caller_life, (key, ticket)))

    def give_back(self, world: "World", ticket_ids: list[str]) -> None:
        """Return pages that the offer book has freed to the pool, after a check with the ledger."""
        for ticket_id in ticket_ids:
            if ticket_id not in self.accounts:
                raise Violation(f"P freed the pages of {ticket_id}, which it does not hold")
            ledger.check_given_back(self.accounts.pop(ticket_id), ticket_id, world.now)
            self.pool.release(self.offered.pop(ticket_id))
        if ticket_ids:
            self.admit(world)

    # ------------------------------------------------------------------ invariants

    def check(self, world: "World") -> None:
        """Check that each page's reference count equals its number of owners, and that the pool's invariants hold."""
        self.pool.check_integrity()
        owners = [0] * self.pool.num_blocks
        for pages in [*self.offered.values(), *(job.pages for job in self.jobs.values())]:
            for page in pages:
                owners[page] += 1
        if owners != self.pool._refs:
            raise Violation(f"P's pages have {owners} owners, but reference counts {self.pool._refs}")
        if self.offered.keys() != self.book._offers.keys():
            raise Violation(f"P holds pages of {sorted(self.offered)}, its book has {sorted(self.book._offers)}")

    @property
    def is_idle(self) -> bool:
        """Whether the worker has no pages in use, no offers and no prompts."""
        return self.pool.is_idle and self.book.is_idle and not self.jobs

    def _forget(self, page: BlockId) -> None:
        for content in [c for c, p in self.cached.items() if p == page]:
            del self.cached[content]

    def _lease(self, world: "World", message: Message, ask: Callable[..., Any]) -> float:
        _, _, ticket_id, attempt, reader = message.body
        seconds: float = ask(TicketId(str(ticket_id)), attempt, world.now, reader=reader)
        account = self.accounts[str(ticket_id)]
        self.accounts[str(ticket_id)] = ledger.leased(account, reader, attempt, world.now)
        return seconds

    def _answer(self, world: "World", message: Message, kind: str, ask: Callable[..., Any]) -> None:
        job, incarnation = message.body[:2]
        try:
            world.parts.check_incarnation(str(incarnation), self.incarnation)
            body: tuple[object, ...] = (job, *ask())
        except TicketRejected as error:
            kind, body = "refused", (job, error.reason)
        world.send(Message(kind, self.name, self.life, message.src, message.src_life, body))
