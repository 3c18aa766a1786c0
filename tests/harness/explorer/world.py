"""A state of the model: the effects of actions, and the invariants checked after each action."""

import math
from typing import TYPE_CHECKING, Any

from harness.explorer.network import ANY_LIFE, STREAMS, Message
from harness.explorer.records import Read
from harness.explorer.scenario import LOSSES, MOMENT_SECONDS, SILENCE_SECONDS, RequestPlan, Scenario
from harness.explorer.violation import Violation

if TYPE_CHECKING:
    from harness.explorer.parts import Parts

Action = tuple[Any, ...]
"""An action: a verb followed by arguments."""


def label(action: Action) -> str:
    """Format the action as text for traces; the text is the same in every run."""
    return " ".join(part.label() if isinstance(part, Message) else str(part) for part in action).strip()


class World:
    """Actors, messages and a clock. `clone` shares actors; `apply` copies an actor before changing it."""

    def __init__(self, scenario: Scenario, parts: "Parts") -> None:
        self.scenario, self.parts = scenario, parts
        self.now = 0.0
        self.messages: list[Message] = []
        self.actors: dict[str, Any] = {}
        """`PrefillActor`, `DecodeActor` and `GatewayActor` by name; a crashed actor is absent."""
        self.lives = dict.fromkeys(["P", *scenario.decoders, "G"], 0)
        self.frozen: dict[str, float] = {}
        """Time at which each frozen actor was frozen, by name."""
        self.faults = scenario.faults
        self.lost = False
        """Whether a fault was injected after which pages may stay in use until a timer expires."""
        self.answers: dict[int, str] = {}
        self.started: tuple[int, ...] = ()
        self._owned: set[str] = set()
        self._prints: dict[str, int] = {}
        for name in self.lives:
            self._begin(name)

    # ------------------------------------------------------------------ for the actors

    def plan(self, key: "int | tuple[int, int]") -> RequestPlan:
        """Return the prompt of a request, given the request's number or the key of one of its calls."""
        number = key[0] if isinstance(key, tuple) else key
        return self.scenario.requests[min(number, len(self.scenario.requests) - 1)]

    def send(self, message: Message) -> None:
        """Add a message to the messages in flight."""
        self.messages.append(message)

    def life_of(self, name: str) -> int:
        """Return the current incarnation of an actor."""
        return self.lives[name]

    def answered(self, key: int, how: str, content: tuple[object, ...]) -> None:
        """Record the client's response and check it."""
        if key in self.answers:
            raise Violation(f"request {key} has two responses: {self.answers[key]}, then {how}")
        plan = self.plan(key)
        if how == "done" and content != tuple(plan.content(i) for i in range(plan.num_pages)):
            raise Violation(f"request {key} was computed from wrong KV: {content}")
        if how == "failed" and len(self.actors) == len(self.lives) and not self.frozen:
            raise Violation(f"request {key} failed although a worker could compute it")
        self.answers[key] = how

    def is_excused(self) -> bool:
        """Return whether requests may wait because no worker can compute them, or a transport may still write the pages
        they need."""
        if not self.can_serve(""):
            return True
        decoders = [actor for name, actor in self.actors.items() if name in self.scenario.decoders]
        return any(d.waiting and d.pool.num_quarantined for d in decoders)

    def is_untouched(self) -> bool:
        """Return whether no fault was injected."""
        return self.faults == self.scenario.faults

    def can_serve(self, name: str) -> bool:
        """Return whether a decode worker other than `name` is running."""
        return any(d != name and d in self.actors and d not in self.frozen for d in self.scenario.decoders)

    def looks_alive(self, name: str) -> bool:
        """Return whether the gateway considers this worker alive."""
        return name in self.actors and self.now < self.frozen.get(name, math.inf) + SILENCE_SECONDS

    def remote_pages(self, life: int) -> "tuple[list[tuple[object, ...]], list[int]] | None":
        """Return the page contents and epochs that a transport reads from an incarnation of the prefill worker; `None`
        if it has crashed."""
        actor = self.actors.get("P")
        if actor is None or actor.life != life:
            return None
        return actor.memory, actor.pool.epochs

    # ------------------------------------------------------------------ copies

    def clone(self) -> "World":
        """Return a copy with an independent future."""
        made = object.__new__(World)
        made.__dict__.update(self.__dict__)
        made.messages = self.messages[:]
        made.actors = self.actors.copy()
        made.lives = self.lives.copy()
        made.frozen = self.frozen.copy()
        made.answers = self.answers.copy()
        made._owned = set()
        made._prints = self._prints.copy()
        return made

    def own(self, name: str) -> Any:
        """Return the actor called `name` for modification; copy it first if other worlds share it."""
        actor = self.actors.get(name)
        if actor is None:
            return None
        self._prints.pop(name, None)
        if name not in self._owned:
            actor = self.actors[name] = actor.clone()
            self._owned.add(name)
        return actor

    def fingerprint(self) -> int:
        """Return a hash that is equal for worlds with the same future."""
        for name, actor in self.actors.items():
            if name not in self._prints:
                self._prints[name] = hash(actor.state(self.now))
        tickets = tuple(sorted(hash(self._without_tickets(m)) for m in self.messages))
        frozen = tuple((name, since - self.now) for name, since in sorted(self.frozen.items()))
        rest = (tickets, frozen, self.faults, self.lost, tuple(sorted(self.answers.items())), self.started)
        return hash((rest, tuple((n, self._prints[n], self.lives[n]) for n in sorted(self.actors))))

    def _without_tickets(self, message: Message) -> tuple[object, ...]:
        """Return the message's body with each ticket replaced by its id and age."""
        body = tuple(
            (part.ticket_id, part.incarnation, part.expires_wall - self.now) if hasattr(part, "expires_wall") else part
            for part in message.body
        )
        return (*message[:5], body, message.late)

    # ------------------------------------------------------------------ time

    @property
    def due(self) -> float:
        """Time of the next timer."""
        times = [actor.due for name, actor in self.actors.items() if name not in self.frozen]
        silent = self._silent()
        return min([*times, *(since + SILENCE_SECONDS for since in silent.values())], default=math.inf)

    def _silent(self) -> dict[str, float]:
        """Return frozen workers that the gateway calls although alternatives exist, with the times at which they were
        frozen."""
        gateway = self.actors.get("G")
        waits = {call.to for call in gateway.calls.values()} if gateway is not None else set()
        return {n: since for n, since in self.frozen.items() if n in waits and (n == "P" or self.can_serve(n))}

    def reads(self) -> list[tuple[str, int, Read]]:
        """Return (decode worker, job, read) of each unfinished read."""
        actors = [(name, self.actors[name]) for name in self.scenario.decoders if name in self.actors]
        return [(name, number, read) for name, actor in actors for number, read in actor.reads.items()]

    def waits_for_late_reads(self) -> bool:
        """Return whether an unfinished read is late and may still continue."""
        return any(read.late and not read.is_over for _, _, read in self.reads())

    # ------------------------------------------------------------------ effects of actions

    def apply(self, action: Action) -> None:
        """Apply an action, then check all invariants.

        Raises:
            Violation: an invariant is violated.
        """
        verb = str(action[0])
        try:
            getattr(self, f"_do_{verb}")(*action[1:])
            for name in self._owned:
                actor = self.actors.get(name)
                if actor is not None:
                    actor.check(self)
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error
        self._check_over()

    def _spend(self, kind: str) -> None:
        self.faults -= 1
        self.lost = self.lost or kind in LOSSES

    def _do_deliver(self, message: Message) -> None:
        self.messages.remove(message)
        actor = self.own(message.to)
        if actor is not None and message.to_life in (ANY_LIFE, actor.life):
            actor.receive(self, message)
        elif message.to_life == ANY_LIFE:
            self._unheard(message)

    def _unheard(self, message: Message) -> None:
        """Send an error to the sender of a message whose receiver does not exist."""
        if message.kind in {"describe", "claim"}:
            body = (message.body[0], "GONE")
            self.send(Message("refused", message.to, 0, message.src, message.src_life, body))
        elif message.kind in {"prefill", "decode"}:
            self.send(Message("lost", message.to, 0, "G", message.src_life, (message.body[0],)))
        elif message.kind == "release":
            self._release_unheard(message)

    def _release_unheard(self, message: Message) -> None:
        gateway = self.own("G")
        if gateway is not None and gateway.life == message.src_life:
            gateway.release_unheard(self, *message.body)

    def _do_drop(self, message: Message) -> None:
        self._spend("drop")
        self.messages.remove(message)
        if message.kind == "release":
            self._release_unheard(message)

    def _do_delay(self, message: Message) -> None:
        self._spend("delay")
        self.messages[self.messages.index(message)] = message._replace(late=True)

    def _do_dup(self, message: Message) -> None:
        self._spend("dup")
        self.messages.append(message._replace(late=True))

    def _do_swap(self, message: Message) -> None:
        """Replace a decode worker's ticket with the ticket of a different request."""
        self._spend("swap")
        gateway = self.actors.get("G")
        held = gateway.tickets.items() if gateway is not None else ()
        others = [ticket for key, ticket in held if key != message.body[0][0]]
        others += [m.body[1] for m in self.messages if m.kind == "prefilled" and m.body[1] is not None]
        if others:
            index = self.messages.index(message)
            self.messages[index] = message._replace(body=(message.body[0], others[0], *message.body[2:]))

    def _do_do(self, name: str, what: str, key: tuple[int, int]) -> None:
        actor = self.own(name)
        actor.do(self, what, key)

    def _do_land(self, name: str, number: int) -> None:
        self.own(name).land(self, number)

    def _do_flip(self, name: str, number: int) -> None:
        self._spend("flip")
        self.own(name).land(self, number, flipped=True)

    def _do_epochs(self, name: str, number: int, fault: str) -> None:
        if fault:
            self._spend(fault)
        self.own(name).read_epochs(self, number, fault)

    def _do_stall(self, name: str, number: int) -> None:
        self._spend("stall")
        reads = self.own(name).reads
        reads[number] = reads[number]._replace(late=True)

    def _do_start(self, key: int) -> None:
        self.started = tuple(sorted((*self.started, key)))
        self.own("G").start(self, key)

    def _do_cancel(self, key: int) -> None:
        self._spend("cancel")
        self.own("G").cancel(self, key)

    def _do_cut(self, key: int) -> None:
        """Break the connection of the call in flight: both ends detect it, and its messages are lost."""
        self._spend("cut")
        call = self.actors["G"].calls[key]
        self._break(key, call.number, call.to, call.life)

    def _break(self, key: int, number: int, to: str, life: int) -> None:
        handle = (key, number)
        self.messages = [m for m in self.messages if not (m.kind in STREAMS and m.body[0] == handle)]
        gateway_life = self.lives["G"]
        self.send(Message("lost", to, life, "G", gateway_life, (handle,)))
        self.send(Message("hangup", "G", gateway_life, to, life, (handle,)))

    def _do_crash(self, name: str) -> None:
        self._spend("crash")
        gateway = self.actors.get("G")
        calls = dict(gateway.calls) if gateway is not None else {}
        for key, call in calls.items():
            if name in ("G", call.to):
                self._break(key, call.number, call.to, call.life)
        if name == "G":
            for key in self.actors["G"].runs:
                self.answers[key] = "the gateway crashed"
        del self.actors[name]
        self.frozen.pop(name, None)
        self._prints.pop(name, None)

    def _do_restart(self, name: str) -> None:
        self.lives[name] += 1
        self._begin(name)

    def _do_freeze(self, name: str) -> None:
        self._spend("freeze")
        self.frozen[name] = self.now

    def _do_thaw(self, name: str) -> None:
        del self.frozen[name]

    def _do_time(self) -> None:
        """Advance time to the next timer, and run all timers that are due."""
        if not self.lost and not any(m.late for m in self.messages) and not self.waits_for_late_reads():
            self._check_all_back("before any timer, although nothing was lost")
        until = self.now + MOMENT_SECONDS if self.waits_for_late_reads() and self.scenario.slow else math.inf
        self.now = max(self.now, min(self.due, until))
        self._prints.clear()
        for name in ("P", *self.scenario.decoders, "G"):
            actor = self.actors.get(name)
            if actor is not None and name not in self.frozen and actor.due <= self.now:
                self.own(name).tick(self)
        for _ in self.lives:  # an abandoned call may be retried on a worker that is also silent
            for name, since in self._silent().items():
                if since + SILENCE_SECONDS <= self.now:
                    self.own("G").silent(self, name)
        if self.due <= self.now:
            raise Violation(f"a timer expired at {self.now:g} without an effect")

    # ------------------------------------------------------------------ invariants

    def _check_over(self) -> None:
        """Check that in a final state, without messages and timers, every request has a response and all resources are
        free."""
        if self.messages or self.frozen or len(self.actors) < len(self.lives) or self.reads():
            return
        if any(actor.tasks() for actor in self.actors.values()) or self.due < math.inf:
            return
        self._check_all_back("forever")

    def _check_all_back(self, when: str) -> None:
        for key in self.started:
            if key not in self.answers:
                raise Violation(f"request {key} waits {when}")
        for name, actor in self.actors.items():
            if not actor.is_idle:
                raise Violation(f"{name} still holds resources {when}")

    def _begin(self, name: str) -> None:
        parts, life = self.parts, self.lives[name]
        if name == "P":
            self.actors[name] = parts.prefill(parts, self.scenario.prefill_pages, life)
        elif name == "G":
            self.actors[name] = parts.gateway(parts, life)
        else:
            known = frozenset({0}) if self.scenario.connected and life == 0 else frozenset[int]()
            self.actors[name] = parts.decode(parts, name, self.scenario.decode_pages, life, known)
        self._owned.add(name)
