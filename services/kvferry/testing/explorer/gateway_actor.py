"""A gateway around production trips, their table and their duties: what `gateway.dispatch` and `releases` do."""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kvferry.core.errors import KvferryError, TicketRejected, Unavailable
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SampledToken, SamplingParams
from kvferry.gateway.release import MACHINE, Duty, Event, State
from kvferry.gateway.trip import Ticket, Trip, Verdict, judge
from kvferry.kv import ticket as kv_ticket
from kvferry.rpc.token_source import TokenRequest
from kvferry.testing.explorer import copies
from kvferry.testing.explorer.network import ANY_LIFE, Message
from kvferry.testing.explorer.scenario import FINGERPRINT, REQUEST_SECONDS, RETRY_SECONDS
from kvferry.testing.explorer.violation import Violation

if TYPE_CHECKING:
    from kvferry.testing.explorer.parts import Parts
    from kvferry.testing.explorer.world import World

MAX_FAILURES = 5
MAX_TICKET_LOSSES = 2
RELEASE_TRIES = 3
_TOKEN = (SampledToken(1),)
_SAMPLING = SamplingParams(max_tokens=8, temperature=0.0)


class Call(NamedTuple):
    """The call in flight for one trip."""

    number: int
    to: str
    life: int
    """Of the callee, when it was called."""
    ticket_id: str = ""
    """What a prefill call would offer its pages as."""


class Retry(NamedTuple):
    """A release that was not heard."""

    ticket_id: str
    tries: int
    at: float


class GatewayActor:
    """One life of one gateway."""

    name = "G"

    def __init__(self, parts: "Parts", life: int) -> None:
        self.life = life
        self.trips: dict[int, Trip] = {}
        self.calls: dict[int, Call] = {}
        self.tickets: dict[int, kv_ticket.Ticket] = {}
        """The opened form of each trip's ticket; the real gateway has only bytes."""
        self.deadlines: dict[int, float] = {}
        self.retries: tuple[Retry, ...] = ()
        self.next_call = 0

    def clone(self) -> "GatewayActor":
        """A copy that shares nothing."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.trips = {k: copies.copy_trip(t) for k, t in self.trips.items()}
        made.calls = self.calls.copy()
        made.tickets = self.tickets.copy()
        made.deadlines = self.deadlines.copy()
        return made

    def state(self, now: float) -> tuple[object, ...]:
        """All that matters from now on."""
        return (
            self.life,
            tuple((k, copies.trip_state(t)) for k, t in sorted(self.trips.items())),
            tuple(sorted(self.calls.items())),
            tuple((k, t.ticket_id, t.incarnation, t.expires_wall - now) for k, t in sorted(self.tickets.items())),
            tuple((k, at - now) for k, at in sorted(self.deadlines.items())),
            tuple((r.ticket_id, r.tries, r.at - now) for r in self.retries),
            self.next_call,
        )

    # ------------------------------------------------------------------ the client

    def start(self, world: "World", key: int) -> None:
        """A client asks."""
        plan = world.plan(key)
        request = TokenRequest(RequestId(f"r{key}"), plan.tokens, _SAMPLING, tenant=plan.tenant)
        self.trips[key] = Trip(request)
        self.deadlines[key] = world.now + REQUEST_SECONDS
        self._go_on(world, key)

    def cancel(self, world: "World", key: int) -> None:
        """The client leaves."""
        trip = self.trips[key]
        world.answered(key, "cancelled", ())
        self._end(world, key, trip, Event.CANCEL)

    # ------------------------------------------------------------------ messages

    def receive(self, world: "World", message: Message) -> None:
        """One message for this gateway; an answer to a call that was given up is dropped."""
        key, number = message.body[0]
        call = self.calls.get(key)
        if call is not None and call.number == number:
            getattr(self, f"on_{message.kind}")(world, key, message)

    def on_prefilled(self, world: "World", key: int, message: Message) -> None:
        del self.calls[key]
        trip, ticket = self.trips[key], message.body[1]
        if ticket is None:
            world.answered(key, "short", ())
            self._end(world, key, trip, Event.FINISH)
            return
        assert isinstance(ticket, kv_ticket.Ticket)
        trip.on(Event.OFFER)
        trip.ticket = Ticket(ticket.ticket_id, b"", "P", FINGERPRINT)
        self.tickets[key] = ticket
        trip.emit(_TOKEN, None, world.now)
        for other in range(1, world.scenario.readers):  # the prompt's other samples share the ticket
            twin = Trip(trip.request, State.OFFERED, [1], replace(trip.ticket))
            self.trips[other], self.tickets[other] = twin, ticket
            self.deadlines[other] = world.now + REQUEST_SECONDS
            self._go_on(world, other)
        self._go_on(world, key)

    def on_decoded(self, world: "World", key: int, message: Message) -> None:
        del self.calls[key]
        trip = self.trips[key]
        _, outcome, found = message.body
        if trip.state is State.FETCHING:
            if outcome == "fetched":
                trip.on(Event.FETCH)
                trip.ticket = None
            else:
                self._drop_ticket(world, trip)
        world.answered(key, "done", found)
        self._end(world, key, trip, Event.FINISH)

    def on_rejected(self, world: "World", key: int, message: Message) -> None:
        self._lose(world, key, TicketRejected("no", reason=str(message.body[1])))

    def on_lost(self, world: "World", key: int, message: Message) -> None:
        self._lose(world, key, Unavailable("the connection broke"))

    # ------------------------------------------------------------------ time

    @property
    def due(self) -> float:
        """When `tick` has something to do."""
        return min([*self.deadlines.values(), *(r.at for r in self.retries)], default=float("inf"))

    def tick(self, world: "World") -> None:
        """Let time act."""
        for key, at in list(self.deadlines.items()):
            if at <= world.now:
                if not world.is_excused():
                    raise Violation(f"request {key} waited for {REQUEST_SECONDS:g} s")
                world.answered(key, "late", ())
                self._end(world, key, self.trips[key], Event.FAIL)
        ready = [r for r in self.retries if r.at <= world.now]
        self.retries = tuple(r for r in self.retries if r.at > world.now)
        for retry in ready:
            self._release(world, retry.ticket_id, retry.tries)

    def silent(self, world: "World", name: str) -> None:
        """A worker shows no sign of life: its calls are given up."""
        for key, call in list(self.calls.items()):
            if call.to == name:
                self._hang_up(world, key, call)
                self._lose(world, key, Unavailable("silent"))

    def release_unheard(self, world: "World", ticket_id: str, tries: int) -> None:
        """A release did not arrive."""
        if tries + 1 < RELEASE_TRIES:
            self.retries = (*self.retries, Retry(ticket_id, tries + 1, world.now + RETRY_SECONDS))

    # ------------------------------------------------------------------ what must hold

    def check(self, world: "World") -> None:
        """A trip in flight has a call, one that ended has none."""
        if self.trips.keys() != self.calls.keys():
            raise Violation(f"the gateway serves {sorted(self.trips)} and calls for {sorted(self.calls)}")

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held or owed."""
        return not self.trips and not self.calls and not self.retries

    def tasks(self) -> list[tuple[str, tuple[int, int]]]:
        """Nothing: it acts on messages and time alone."""
        return []

    # ------------------------------------------------------------------ inside

    def _go_on(self, world: "World", key: int) -> None:
        """The next call, from QUEUED or OFFERED."""
        trip = self.trips[key]
        number = self.next_call
        self.next_call += 1
        plan = world.plan(key)
        if trip.state is State.QUEUED and not trip.failures and not trip.emitted and plan.path != "decode":
            ticket_id = f"t{key}.{self.life}"
            trip.on(Event.CALL_PREFILL)
            self.calls[key] = Call(number, "P", world.life_of("P"), ticket_id)
            self._send(world, "prefill", "P", ((key, number), ticket_id))
            return
        decoders = world.scenario.decoders
        first = decoders[key % len(decoders) :] + decoders[: key % len(decoders)]
        there = [d for d in first if world.looks_alive(d)]
        to = next((d for d in there if d not in trip.excluded), (there or first)[0])
        ticket, attempt = None, 0
        if trip.ticket is not None:
            ticket, attempt = self.tickets[key], trip.ticket.deliveries
            trip.ticket = replace(trip.ticket, deliveries=attempt + 1)
        trip.on(Event.CALL_DECODE)
        self.calls[key] = Call(number, to, world.life_of(to))
        reader = key if world.scenario.readers > 1 else 0
        self._send(world, "decode", to, ((key, number), ticket, attempt, reader))

    def _lose(self, world: "World", key: int, error: KvferryError) -> None:
        """As `dispatch._take_loss`."""
        trip, call = self.trips[key], self.calls.pop(key)
        trip.on(Event.LOSE)
        verdict = judge(error)
        trip.failed(error, None if verdict is Verdict.DROP_TICKET else call.to)
        if verdict is Verdict.SUSPECT and trip.ticket is not None:
            trip.ticket = replace(trip.ticket, losses=trip.ticket.losses + 1)
        if trip.ticket is not None and (verdict is Verdict.DROP_TICKET or trip.ticket.losses >= MAX_TICKET_LOSSES):
            self._drop_ticket(world, trip)
        if trip.failures > MAX_FAILURES:
            world.answered(key, "failed", ())
            self._end(world, key, trip, Event.FAIL)
            return
        self._go_on(world, key)

    def _end(self, world: "World", key: int, trip: Trip, event: Event) -> None:
        """As `dispatch._end`."""
        duties = world.parts.duties[trip.state]
        trip.on(event)
        assert trip.state in MACHINE.final
        del self.trips[key], self.deadlines[key]
        self.tickets.pop(key, None)
        call = self.calls.pop(key, None)
        for duty in duties:
            if duty in (Duty.CANCEL_PREFILL, Duty.CANCEL_DECODE) and call is not None:
                self._hang_up(world, key, call)
            if duty is Duty.RELEASE_TICKET and trip.ticket is not None:
                self._release(world, trip.ticket.ticket_id, 0)

    def _hang_up(self, world: "World", key: int, call: Call) -> None:
        world.send(Message("hangup", "G", self.life, call.to, call.life, ((key, call.number),)))
        if call.ticket_id:
            self._release(world, call.ticket_id, 0)

    def _drop_ticket(self, world: "World", trip: Trip) -> None:
        if trip.ticket is not None:
            self._release(world, trip.ticket.ticket_id, 0)
            trip.ticket = None
            trip.on(Event.DROP)

    def _release(self, world: "World", ticket_id: str, tries: int) -> None:
        if world.scenario.held:
            self._send(world, "release", "P", (ticket_id, tries))

    def _send(self, world: "World", kind: str, to: str, body: tuple[object, ...]) -> None:
        world.send(Message(kind, "G", self.life, to, ANY_LIFE, body))
