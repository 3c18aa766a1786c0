"""Model of a decode worker with production attempts and block pool; engine, fetcher and service are replaced."""

from collections import deque
from typing import TYPE_CHECKING

from harness.explorer import copies
from harness.explorer.network import ANY_LIFE, Message
from harness.explorer.records import STRAY, CallKey, Content, Load, Read, Request
from harness.explorer.scenario import FINGERPRINT, TRANSFER_TIMES, page_digest
from harness.explorer.violation import Violation
from kvferry.core.errors import KvferryError, TicketRejected, Unavailable
from kvferry.core.ids import BlockId
from kvferry.engine.schedule.blocks.block_pool import BlockPool
from kvferry.kv.handoff import attempt as effects
from kvferry.kv.handoff.attempt import Effect, Effects
from kvferry.kv.handoff.transfers import TransferState
from kvferry.kv.interface.connector import FetchSource

if TYPE_CHECKING:
    from harness.explorer.parts import Parts
    from harness.explorer.world import World


class DecodeActor:
    """An incarnation of a decode worker."""

    def __init__(self, parts: "Parts", name: str, num_pages: int, life: int, known: frozenset[int]) -> None:
        self.name, self.life = name, life
        self.pool: BlockPool = parts.decode_pool(num_pages)
        self.memory: list[Content] = [()] * num_pages
        self.requests: dict[CallKey, Request] = {}
        self.waiting: tuple[CallKey, ...] = ()
        self.loads: dict[int, Load] = {}
        self.reads: dict[int, Read] = {}
        self.known = known
        """Incarnations of the prefill worker to which the transport has connected."""
        self.next_job = 0

    def clone(self) -> "DecodeActor":
        """Return an independent copy."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.pool = copies.copy_pool(self.pool, None)
        made.memory = self.memory[:]
        made.requests = self.requests.copy()
        made.loads = {n: Load(load.key, copies.copy_attempt(load.attempt)) for n, load in self.loads.items()}
        made.reads = self.reads.copy()
        return made

    def state(self, now: float) -> tuple[object, ...]:
        """Return the part of the state that affects the future, with times relative to `now`."""
        requests = tuple(
            (k, r.caller_life, r.source and (r.source.ticket.ticket_id, r.source.attempt), *r[2:])
            for k, r in sorted(self.requests.items())
        )
        loads = tuple((n, load.key, copies.attempt_state(load.attempt, now)) for n, load in sorted(self.loads.items()))
        return (
            self.life,
            copies.pool_state(self.pool),
            tuple(self.memory),
            requests,
            self.waiting,
            loads,
            tuple(sorted(self.reads.items())),
            self.known,
            self.next_job,
        )

    # ------------------------------------------------------------------ messages

    def receive(self, world: "World", message: Message) -> None:
        """Handle a message."""
        getattr(self, f"on_{message.kind}")(world, message)

    def on_decode(self, world: "World", message: Message) -> None:
        key, ticket, attempt, reader = message.body
        plan = world.plan(key)
        source = None
        if ticket is not None:
            source = FetchSource(ticket, attempt, reader)
            try:
                world.parts.check_ticket(
                    ticket,
                    fingerprint=FINGERPRINT,
                    block_tokens=1,
                    scope=plan.tenant,
                    tokens=(*plan.tokens, 0),
                    now_wall=world.now,
                )
            except TicketRejected as error:
                if error.reason != "TICKET_EXPIRED":
                    body = (key, error.reason)
                    world.send(Message("rejected", self.name, self.life, "G", message.src_life, body))
                    return
                source = None
        self.requests[key] = Request(message.src_life, source, ticket is not None)
        self.waiting = (*self.waiting, key)
        self.admit(world)

    def on_hangup(self, world: "World", message: Message) -> None:
        """Handle the caller's disconnect: abort the request and dismiss the offer, like `workers.services.decode`."""
        key = message.body[0]
        request = self.requests.pop(key, None)
        if request is None:
            return
        self.waiting = tuple(k for k in self.waiting if k != key)
        for number, load in list(self.loads.items()):
            if load.key == key:
                self.perform(world, number, load.attempt.cancel())
        self.pool.release(request.pages)
        self.dismiss(world, request)
        self.admit(world)

    def dismiss(self, world: "World", request: Request) -> None:
        """Send `finish` for the offer to the peer, since its pages are not needed."""
        if request.source is not None and request.source.ticket.held and not request.is_loaded:
            self._tell_finish(world, request.source, done=True)

    def on_described(self, world: "World", message: Message) -> None:
        load = self.loads.get(message.body[0])
        self.known |= {message.src_life}
        if load is not None:
            self.perform(world, message.body[0], load.attempt.connected(world.now))

    def on_claimed(self, world: "World", message: Message) -> None:
        load = self.loads.get(message.body[0])
        if load is not None:
            self.perform(world, message.body[0], load.attempt.claimed(message.body[1], world.now))

    def on_refused(self, world: "World", message: Message) -> None:
        load = self.loads.get(message.body[0])
        reason = str(message.body[1])
        error: KvferryError = Unavailable("no answer") if reason == "GONE" else TicketRejected("refused", reason=reason)
        if load is not None:
            self.perform(world, message.body[0], load.attempt.refused(error))

    # ------------------------------------------------------------------ time and the worker's own steps

    @property
    def due(self) -> float:
        """Time of the next timer."""
        return min((load.attempt.due for load in self.loads.values()), default=float("inf"))

    def tick(self, world: "World") -> None:
        """Run all timers that are due."""
        for number, load in list(self.loads.items()):
            if number in self.loads:
                self.perform(world, number, load.attempt.tick(world.now))

    def tasks(self) -> list[tuple[str, CallKey]]:
        """Return the steps that the worker can take without a message."""
        return [("run", key) for key, request in self.requests.items() if request.state == "running"]

    def do(self, world: "World", what: str, key: CallKey) -> None:
        """Compute the tokens that were not fetched, respond, and free the pages."""
        request, plan = self.requests.pop(key), world.plan(key)
        if not request.is_loaded:
            for i, page in enumerate(request.pages):
                self.memory[page] = plan.content(i)
        found = tuple(self.memory[page] for page in request.pages)
        self.pool.release(request.pages)
        outcome = "fetched" if request.is_loaded else "recomputed" if request.had_ticket else "none"
        body = (key, outcome, found)
        world.send(Message("decoded", self.name, self.life, "G", request.caller_life, body))
        self.admit(world)

    def admit(self, world: "World") -> None:
        """Allocate pages to waiting requests in order of arrival, as long as the pool has enough free pages."""
        while self.waiting:
            key = self.waiting[0]
            request = self.requests[key]
            source = request.source
            wanted = world.plan(key).num_pages
            if source is not None and not world.parts.accepts_fetch(
                num_quarantined=self.pool.num_quarantined,
                num_blocks=self.pool.num_blocks,
                num_pages=wanted,
                share=0.5,
            ):
                source = None
            pages = self.pool.allocate(wanted)
            if pages is None:
                return
            self.waiting = self.waiting[1:]
            request = request._replace(pages=tuple(pages), source=source)
            self.requests[key] = request._replace(state="running" if source is None else "loading")
            if source is not None:
                self._load(world, key, source, pages)

    def _load(self, world: "World", key: CallKey, source: FetchSource, pages: list[BlockId]) -> None:
        local = world.scenario.local_pages
        for i in range(local):
            self.memory[pages[i]] = world.plan(key).content(i)
        targets = pages[local:]
        self.pool.begin_write(targets)
        number = self.next_job
        self.next_job += 1
        attempt = world.parts.attempt(
            source, local, targets, connector="memory", block_bytes=1, times=TRANSFER_TIMES, now=world.now
        )
        self.loads[number] = Load(key, attempt)
        self.perform(world, number, attempt.begin(world.now))

    # ------------------------------------------------------------------ the attempt's effects

    def perform(self, world: "World", number: int, wanted: Effects) -> None:
        """Execute an attempt's effects, and the effects that follow from them."""
        load, todo = self.loads[number], deque(wanted)
        while todo:
            todo.extend(self.do_effect(world, number, load, todo.popleft()))

    def do_effect(self, world: "World", number: int, load: Load, effect: Effect) -> Effects:
        """Execute an effect and return the effects that follow from it."""
        attempt = load.attempt
        source = attempt.source
        life = self.life_asked(world, source)
        match effect:
            case effects.Connect():
                if life in self.known:
                    return attempt.connected(world.now)
                self._ask(world, "describe", number, source)
            case effects.Claim():
                self._ask(world, "claim", number, source)
            case effects.Renew():
                self._ask(world, "renew", number, source)
            case effects.StartRead():
                self.reads[number] = Read(
                    tuple(attempt.local), tuple(attempt.remote), life, load.key, late=world.scenario.slow
                )
                attempt.progress(0, world.now)
            case effects.ReadEpochs():
                self.reads[number] = self.reads[number]._replace(wants_epochs=True)
            case effects.CheckDigests():
                found = [page_digest(self.memory[page]) for page in attempt.local]
                return attempt.digests(equal=found == attempt.expected_digests)
            case effects.Forget():
                self.known -= {life}
            case effects.Report(failure):
                self.report(world, number, load, failure)
            case effects.Quiet():
                self.quiet(world, number)
            case effects.Finish(done):
                self._tell_finish(world, source, done=done)
        if attempt.state is TransferState.DRAINING and isinstance(effect, effects.Report):
            read = self.reads.get(number)
            if read is None or read.is_over:
                return attempt.quiet()
        return []

    def report(self, world: "World", number: int, load: Load, failure: str | None) -> None:
        """Report the outcome of a load to the engine."""
        request = self.requests.get(load.key)
        if request is None or request.state != "loading" or not {*load.attempt.local} <= {*request.pages}:
            return  # the request has been aborted
        if failure is None:
            for i, page in enumerate(request.pages):
                if self.memory[page] != world.plan(load.key).content(i):
                    raise Violation(
                        f"{self.name} accepted page {i} of request {load.key} with {self.memory[page]} in it"
                    )
            self.requests[load.key] = request._replace(state="running", is_loaded=True)
            return
        self.requests[load.key] = request._replace(state="waiting", pages=(), source=None)
        self.pool.release(request.pages)
        self.waiting = (load.key, *self.waiting)
        self.wake(world)

    def quiet(self, world: "World", number: int) -> None:
        """Report to the engine that all writes to a load's pages have ended."""
        load = self.loads.pop(number, None)
        if load is None:
            raise Violation(f"{self.name} got two quiet reports for job {number}")
        self.pool.end_write(load.attempt.local)
        if number in self.reads and self.reads[number].is_over:
            del self.reads[number]
        self.wake(world)

    def wake(self, world: "World") -> None:
        """Run the engine's next step."""
        self.admit(world)

    # ------------------------------------------------------------------ the transport

    def life_asked(self, world: "World", source: FetchSource) -> int:
        """Return the incarnation of the peer from which a read is requested."""
        return int(source.ticket.incarnation[1:])

    def land(self, world: "World", number: int, *, flipped: bool = False) -> None:
        """Copy one page as the transport does, with `flipped` bits if set, or detect that the peer has crashed."""
        read, load = self.reads[number], self.loads.get(number)
        target = read.local[read.next]
        pages = world.remote_pages(read.life)
        if pages is None and not read.is_broken:  # the peer crashed; one more write may be in flight
            self.reads[number] = read._replace(is_broken=True)
            if load is not None:
                self.perform(world, number, load.attempt.broken("the peer has crashed"))
            return
        self._write(read, target, STRAY if pages is None or flipped else pages[0][read.remote[read.next]])
        over = read.is_broken or read.next + 1 == len(read.local)
        self.reads[number] = read._replace(next=read.next + 1, is_over=over, late=world.scenario.slow)
        if load is None:
            if over:
                del self.reads[number]
            return
        self.perform(world, number, load.attempt.progress(read.next + 1, world.now))
        if over:
            arrived = [] if read.is_broken else load.attempt.arrived(world.now)
            self.perform(world, number, [*arrived, *load.attempt.quiet()])

    def read_epochs(self, world: "World", number: int, fault: str) -> None:
        """Read the epochs as the transport does, or fail."""
        attempt = self.loads[number].attempt
        self.reads[number] = self.reads[number]._replace(wants_epochs=False)
        pages = world.remote_pages(self.reads[number].life)
        if pages is None or fault == "lose":
            self.perform(world, number, attempt.broken("the epochs cannot be read"))
            return
        found = [pages[1][page] for page in attempt.remote]
        self.perform(world, number, attempt.epochs(found[:-1] if fault == "short" else found))

    def _write(self, read: Read, page: BlockId, content: Content) -> None:
        holder = next((k for k, r in self.requests.items() if page in r.pages), None)
        if self.pool._writers[page] == 0:
            raise Violation(f"a read of request {read.key} wrote into page {page} of {self.name}, which expects none")
        if holder is not None and self.requests[holder].state == "running":
            raise Violation(f"a read wrote into page {page} of {self.name}, which request {holder} computes with")
        if holder is not None and holder != read.key:
            raise Violation(f"a read of request {read.key} wrote into page {page} of request {holder} at {self.name}")
        self.memory[page] = content

    # ------------------------------------------------------------------ invariants

    def check(self, world: "World") -> None:
        """Check that each page's reference count equals its number of owners, and that the pool's invariants hold."""
        self.pool.check_integrity()
        owners = [0] * self.pool.num_blocks
        for request in self.requests.values():
            for page in request.pages:
                owners[page] += 1
        if owners != self.pool._refs:
            raise Violation(f"pages of {self.name} have owners {owners}, counted {self.pool._refs}")

    @property
    def is_idle(self) -> bool:
        """Whether the worker has no pages in use, no loads and no requests."""
        return self.pool.is_idle and not self.loads and not self.requests

    def _ask(self, world: "World", kind: str, number: int, source: FetchSource) -> None:
        ticket = source.ticket
        body: tuple[object, ...] = (number, ticket.incarnation)
        if kind != "describe":
            body = (*body, ticket.ticket_id, source.attempt, source.reader)
        world.send(Message(kind, self.name, self.life, "P", ANY_LIFE, body))

    def _tell_finish(self, world: "World", source: FetchSource, *, done: bool) -> None:
        ticket = source.ticket
        body = (-1, ticket.incarnation, ticket.ticket_id, source.attempt, source.reader, done)
        world.send(Message("finish", self.name, self.life, "P", ANY_LIFE, body))
