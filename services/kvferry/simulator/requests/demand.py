"""Requests of a simulation, drawn one by one in order of arrival, so that memory does not grow with their number."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from kvferry.bench.workload.arrivals import Arrivals
from kvferry.bench.workload.lengths import LengthMix
from kvferry.bench.workload.requests import BenchRequest
from kvferry.core.errors import UsageError
from kvferry.core.sampling import SampledToken
from kvferry.simulator.requests.tokens import UNIQUE_ID, Output, Tape

MAX_REQUESTS = 100_000_000
_CHUNK = 65_536
"""Number of arrival times that are drawn at once."""
_MAX_PREFIXES = 1 << 16
_MAX_WAITING_TOKENS = 1 << 28
"""Maximum number of tokens of all conversations between two turns; a token takes eight bytes."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request."""

    index: int
    """Position in the order of arrival, from 0."""
    at: float
    """Arrival time in seconds after the start."""
    prompt: Sequence[int]
    output: Output
    tenant: str = ""
    priority: int = 0
    retain_seconds: float = 0.0
    """Time for which it asks workers to keep its prompt in the cache; 0 for no retention."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant of the workload."""

    name: str = ""
    share: float = 1.0
    """Share of the conversations, relative to other tenants."""
    weight: float = 1.0
    """Weight in the gateway's fair queue."""
    priority: int = 0
    num_turns: int | None = None
    """Turns of its conversations; `None` for those of the workload."""
    turn_seconds: float | None = None
    """Seconds between two turns; `None` for those of the workload."""
    retain_seconds: float = 0.0
    """Time for which its requests ask workers to keep their prompts in the cache; 0 for no retention."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A synthetic workload: lengths, shared prefixes, turns of conversations, tenants and arrivals."""

    lengths: LengthMix
    count: int
    """Number of requests."""
    arrivals: Arrivals
    num_prefix: int = 0
    """Tokens of the prefix that begins each conversation, one of `num_prefixes`."""
    num_prefixes: int = 1
    num_turns: int = 1
    """Turns of a conversation. The prompt of a turn begins with the prompt and the output of the previous turn."""
    turn_seconds: float = 5.0
    """Seconds between the arrivals of two turns."""
    most_tokens: int = 1 << 20
    """Maximum number of prompt and output tokens of a request; a conversation ends before it exceeds them."""
    tenants: tuple[Tenant, ...] = field(default=(Tenant(),))

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            UsageError: a number is out of range.
        """
        for name, low, high in (
            ("count", 1, MAX_REQUESTS), ("num_prefix", 0, 1 << 20), ("num_prefixes", 1, _MAX_PREFIXES),
            ("num_turns", 1, 10_000), ("turn_seconds", 0.0, 86_400.0), ("most_tokens", 2, 1 << 22),
        ):  # fmt: skip
            value = getattr(self, name)
            if not low <= value <= high:
                shown = "requests" if name == "count" else name
                raise UsageError(
                    f"workload.{shown} must be between {low} and {high}, not {value}", field=f"workload.{shown}"
                )

    def requests(self, tape: Tape, seed: int) -> Iterator[SimRequest]:
        """Draw the requests, in order of arrival.

        Args:
            tape: source of the tokens.
            seed: seed of arrivals and lengths.

        Raises:
            UsageError: too many long conversations wait for their next turn.
        """
        draw = Random(f"demand {seed}")  # noqa: S311  a workload needs no secret numbers
        later: list[tuple[float, int, _Turn]] = []
        starts = self._starts(draw)
        start = next(starts, None)
        made = waiting = 0
        while made < self.count and (start is not None or later):
            if start is not None and (not later or start <= later[0][0]):
                turn, at = self._conversation(draw, tape, made), start
                start = next(starts, None)
            else:
                at, _, turn = heapq.heappop(later)
                waiting -= len(turn.history)
            num_input, num_output = turn.lengths
            prompt = [*turn.history, *tape.unique(self.num_prefixes + made, num_input)]
            output = Output.of(tape, made, num_output)
            tenant = turn.tenant
            yield SimRequest(made, at, prompt, output, tenant.name, tenant.priority, tenant.retain_seconds)
            made += 1
            if turn.left > 1:
                following = _Turn([*prompt, *output.ids()], turn.left - 1, tenant, self.lengths.draw(draw))
                if len(following.history) + sum(following.lengths) <= self.most_tokens:
                    gap = self.turn_seconds if tenant.turn_seconds is None else tenant.turn_seconds
                    heapq.heappush(later, (at + gap, made, following))
                    waiting += len(following.history)
                    if waiting > _MAX_WAITING_TOKENS:
                        raise UsageError(
                            f"{len(later)} conversations with {waiting} tokens wait for their next turn; lower "
                            "workload.rate, turn_seconds, most_tokens or the lengths",
                            field="workload.rate",
                        )

    def _starts(self, draw: Random) -> Iterator[float]:
        """Draw the arrivals of the first turns, as many as the requests may need."""
        left, start = self.count, 0.0
        while left > 0:
            some = min(left, _CHUNK)
            is_last = some == left
            times = self.arrivals.times(some if is_last else some + 1, draw)
            for time in times[:some]:
                yield start + time
            if not is_last:
                start += times[some]
            left -= some

    def _conversation(self, draw: Random, tape: Tape, number: int) -> "_Turn":
        tenant = self.tenants[0]
        if len(self.tenants) > 1:
            tenant = draw.choices(self.tenants, [one.share for one in self.tenants])[0]
        prefix = tape.unique(draw.randrange(self.num_prefixes), self.num_prefix) if self.num_prefix else []
        room = self.most_tokens - len(prefix)
        num_turns = self.num_turns if tenant.num_turns is None else tenant.num_turns
        return _Turn(prefix, num_turns, tenant, _within(self.lengths.draw(draw), max(2, room)))


@dataclass(slots=True)
class _Turn:
    history: list[int]
    left: int
    """Number of remaining turns of the conversation, including this one."""
    tenant: Tenant
    lengths: tuple[int, int]


def _within(lengths: tuple[int, int], limit: int) -> tuple[int, int]:
    """Cut the input, then the output, so that their sum is at most `limit`."""
    num_input = min(lengths[0], limit - 1)
    return num_input, min(lengths[1], limit - num_input)


def of_trace(requests: Iterable[BenchRequest], tape: Tape, *, repeat: int = 1) -> Iterator[SimRequest]:
    """Convert the requests of a trace, which are sorted by arrival.

    Args:
        requests: requests of the trace.
        tape: tokens of the outputs.
        repeat: number of copies of each request, all at its time. The prompts of different copies share nothing, as if
            each copy belonged to a different tenant. Replays a trace at a higher load without changing its pattern.
    """
    number = 0
    for request in requests:
        for copy in range(repeat):
            prompt = request.prompt if not copy else [UNIQUE_ID + copy, *request.prompt[1:]]
            output = Output.of(tape, number, request.num_output)
            if request.output is not None:
                output = replace(output, known=tuple(map(SampledToken, request.output)))
            yield SimRequest(number, request.at, prompt, output)
            number += 1
