"""Model of a gateway with production sample runs; `gateway.dispatch.dispatcher` and `releases` are replaced."""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from harness.explorer import copies
from harness.explorer.network import ANY_LIFE, Message
from harness.explorer.scenario import FINGERPRINT, REQUEST_SECONDS, RETRY_SECONDS
from harness.explorer.violation import Violation
from kvferry.core.errors import KvferryError, TicketRejected, Unavailable
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SampledToken, SamplingParams
from kvferry.gateway.decide.lifecycle.retry_decision import RetryDecision, retry_decision
from kvferry.gateway.decide.lifecycle.sample_run import SampleRun, SealedTicket
from kvferry.gateway.decide.lifecycle.sample_states import MACHINE, Duty, SampleEvent, State
from kvferry.kv.interface import ticket as kv_ticket
from kvferry.serving.request import Caller, Request

if TYPE_CHECKING:
    from harness.explorer.parts import Parts
    from harness.explorer.world import World

MAX_FAILURES = 5
MAX_TICKET_LOSSES = 2
RELEASE_TRIES = 3
_TOKEN = (SampledToken(1),)
_SAMPLING = SamplingParams(max_tokens=8, temperature=0.0)


class Call(NamedTuple):
    """A call in flight for a sample run."""

    number: int
    to: str
    life: int
    """Incarnation of the called worker when the call was made."""
    ticket_id: str = ""
    """Ticket id of the offer that a prefill call creates; empty for a decode call."""


class Retry(NamedTuple):
    """A release that failed and will be retried."""

    ticket_id: str
    tries: int
    at: float


class GatewayActor:
    """An incarnation of a gateway."""

    name = "G"

    def __init__(self, parts: "Parts", life: int) -> None:
        self.life = life
        self.runs: dict[int, SampleRun] = {}
        self.calls: dict[int, Call] = {}
        self.tickets: dict[int, kv_ticket.Ticket] = {}
        """Ticket of each run, in opened form; the real gateway has only the sealed bytes."""
        self.deadlines: dict[int, float] = {}
        self.retries: tuple[Retry, ...] = ()
        self.next_call = 0

    def clone(self) -> "GatewayActor":
        """Return an independent copy."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.runs = {k: copies.copy_run(t) for k, t in self.runs.items()}
        made.calls = self.calls.copy()
        made.tickets = self.tickets.copy()
        made.deadlines = self.deadlines.copy()
        return made

    def state(self, now: float) -> tuple[object, ...]:
        """Return the part of the state that affects the future, with times relative to `now`."""
        return (
            self.life,
            tuple((k, copies.run_state(t)) for k, t in sorted(self.runs.items())),
            tuple(sorted(self.calls.items())),
            tuple((k, t.ticket_id, t.incarnation, t.expires_wall - now) for k, t in sorted(self.tickets.items())),
            tuple((k, at - now) for k, at in sorted(self.deadlines.items())),
            tuple((r.ticket_id, r.tries, r.at - now) for r in self.retries),
            self.next_call,
        )

    # ------------------------------------------------------------------ the client

    def start(self, world: "World", key: int) -> None:
        """Start request `key`, as sent by a client."""
        plan = world.plan(key)
        request = Request(Caller(RequestId(f"r{key}"), plan.tenant), plan.tokens, _SAMPLING)
        self.runs[key] = SampleRun(request)
        self.deadlines[key] = world.now + REQUEST_SECONDS
        self._go_on(world, key)

    def cancel(self, world: "World", key: int) -> None:
        """Handle the disconnect of a request's client."""
        run = self.runs[key]
        world.answered(key, "cancelled", ())
        self._end(world, key, run, SampleEvent.CANCEL)

    # ------------------------------------------------------------------ messages

    def receive(self, world: "World", message: Message) -> None:
        """Handle a message; drop responses to abandoned calls."""
        key, number = message.body[0]
        call = self.calls.get(key)
        if call is not None and call.number == number:
            getattr(self, f"on_{message.kind}")(world, key, message)

    def on_prefilled(self, world: "World", key: int, message: Message) -> None:
        del self.calls[key]
        run, ticket = self.runs[key], message.body[1]
        if ticket is None:
            world.answered(key, "short", ())
            self._end(world, key, run, SampleEvent.FINISH)
            return
        assert isinstance(ticket, kv_ticket.Ticket)
        run.on(SampleEvent.OFFER)
        run.ticket = SealedTicket(ticket.ticket_id, b"", "P", FINGERPRINT)
        self.tickets[key] = ticket
        run.emit(_TOKEN, None, world.now)
        for other in range(1, world.scenario.readers):  # the ticket is shared with the prompt's other samples
            twin = SampleRun(run.request, State.OFFERED, [1], replace(run.ticket))
            self.runs[other], self.tickets[other] = twin, ticket
            self.deadlines[other] = world.now + REQUEST_SECONDS
            self._go_on(world, other)
        self._go_on(world, key)

    def on_decoded(self, world: "World", key: int, message: Message) -> None:
        del self.calls[key]
        run = self.runs[key]
        _, outcome, found = message.body
        if run.state is State.FETCHING:
            if outcome == "fetched":
                run.on(SampleEvent.FETCH)
                run.ticket = None
            else:
                self._drop_ticket(world, run)
        world.answered(key, "done", found)
        self._end(world, key, run, SampleEvent.FINISH)

    def on_rejected(self, world: "World", key: int, message: Message) -> None:
        self._lose(world, key, TicketRejected("no", reason=str(message.body[1])))

    def on_lost(self, world: "World", key: int, message: Message) -> None:
        self._lose(world, key, Unavailable("the connection broke"))

    # ------------------------------------------------------------------ time

    @property
    def due(self) -> float:
        """Time of the next timer."""
        return min([*self.deadlines.values(), *(r.at for r in self.retries)], default=float("inf"))

    def tick(self, world: "World") -> None:
        """Run all timers that are due."""
        for key, at in list(self.deadlines.items()):
            if at <= world.now:
                if not world.is_excused():
                    raise Violation(f"request {key} waited for {REQUEST_SECONDS:g} s")
                world.answered(key, "late", ())
                self._end(world, key, self.runs[key], SampleEvent.FAIL)
        ready = [r for r in self.retries if r.at <= world.now]
        self.retries = tuple(r for r in self.retries if r.at > world.now)
        for retry in ready:
            self._release(world, retry.ticket_id, retry.tries)

    def silent(self, world: "World", name: str) -> None:
        """Abandon the calls to a worker that has been silent for too long."""
        for key, call in list(self.calls.items()):
            if call.to == name:
                self._hang_up(world, key, call)
                self._lose(world, key, Unavailable("silent"))

    def release_unheard(self, world: "World", ticket_id: str, tries: int) -> None:
        """Schedule a retry of a release that was not delivered."""
        if tries + 1 < RELEASE_TRIES:
            self.retries = (*self.retries, Retry(ticket_id, tries + 1, world.now + RETRY_SECONDS))

    # ------------------------------------------------------------------ invariants

    def check(self, world: "World") -> None:
        """Check that exactly the runs in flight have a call."""
        if self.runs.keys() != self.calls.keys():
            raise Violation(f"the gateway has runs {sorted(self.runs)} but calls for {sorted(self.calls)}")

    @property
    def is_idle(self) -> bool:
        """Whether the gateway has no runs, calls or pending releases."""
        return not self.runs and not self.calls and not self.retries

    def tasks(self) -> list[tuple[str, tuple[int, int]]]:
        """Return an empty list: the gateway acts only on messages and timers."""
        return []

    # ------------------------------------------------------------------ internal

    def _go_on(self, world: "World", key: int) -> None:
        """Make the next call for a run in state QUEUED or OFFERED."""
        run = self.runs[key]
        number = self.next_call
        self.next_call += 1
        plan = world.plan(key)
        if run.state is State.QUEUED and not run.failures and not run.emitted and plan.path != "decode":
            ticket_id = f"t{key}.{self.life}"
            run.on(SampleEvent.CALL_PREFILL)
            self.calls[key] = Call(number, "P", world.life_of("P"), ticket_id)
            self._send(world, "prefill", "P", ((key, number), ticket_id))
            return
        decoders = world.scenario.decoders
        first = decoders[key % len(decoders) :] + decoders[: key % len(decoders)]
        there = [d for d in first if world.looks_alive(d)]
        to = next((d for d in there if d not in run.excluded), (there or first)[0])
        ticket, attempt = None, 0
        if run.ticket is not None:
            ticket, attempt = self.tickets[key], run.ticket.deliveries
            run.ticket = replace(run.ticket, deliveries=attempt + 1)
        run.on(SampleEvent.CALL_DECODE)
        self.calls[key] = Call(number, to, world.life_of(to))
        reader = key if world.scenario.readers > 1 else 0
        self._send(world, "decode", to, ((key, number), ticket, attempt, reader))

    def _lose(self, world: "World", key: int, error: KvferryError) -> None:
        """Handle a lost call, like `Dispatcher._take_loss`."""
        run, call = self.runs[key], self.calls.pop(key)
        run.on(SampleEvent.LOSE)
        decision = retry_decision(error)
        run.failed(error, None if decision is RetryDecision.DROP_TICKET else call.to)
        if decision is RetryDecision.SUSPECT and run.ticket is not None:
            run.ticket = replace(run.ticket, losses=run.ticket.losses + 1)
        if run.ticket is not None and (decision is RetryDecision.DROP_TICKET or run.ticket.losses >= MAX_TICKET_LOSSES):
            self._drop_ticket(world, run)
        if run.failures > MAX_FAILURES:
            world.answered(key, "failed", ())
            self._end(world, key, run, SampleEvent.FAIL)
            return
        self._go_on(world, key)

    def _end(self, world: "World", key: int, run: SampleRun, event: SampleEvent) -> None:
        """End a run, like `Ending.end`."""
        duties = world.parts.duties[run.state]
        run.on(event)
        assert run.state in MACHINE.final
        del self.runs[key], self.deadlines[key]
        self.tickets.pop(key, None)
        call = self.calls.pop(key, None)
        for duty in duties:
            if duty in (Duty.CANCEL_PREFILL, Duty.CANCEL_DECODE) and call is not None:
                self._hang_up(world, key, call)
            if duty is Duty.RELEASE_TICKET and run.ticket is not None:
                self._release(world, run.ticket.ticket_id, 0)

    def _hang_up(self, world: "World", key: int, call: Call) -> None:
        world.send(Message("hangup", "G", self.life, call.to, call.life, ((key, call.number),)))
        if call.ticket_id:
            self._release(world, call.ticket_id, 0)

    def _drop_ticket(self, world: "World", run: SampleRun) -> None:
        if run.ticket is not None:
            self._release(world, run.ticket.ticket_id, 0)
            run.ticket = None
            run.on(SampleEvent.DROP)

    def _release(self, world: "World", ticket_id: str, tries: int) -> None:
        if world.scenario.held:
            self._send(world, "release", "P", (ticket_id, tries))

    def _send(self, world: "World", kind: str, to: str, body: tuple[object, ...]) -> None:
        world.send(Message(kind, "G", self.life, to, ANY_LIFE, body))
