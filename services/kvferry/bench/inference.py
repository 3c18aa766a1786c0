"""`kvferry bench latency|throughput`: one engine in this process, against the bound of its own steps.

Each round measures the machine first and the engine right after it, so that both meet the same neighbours.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.bench.roofline import Machine, measure_machine, random_tokens, step_work
from kvferry.bench.rows import as_row
from kvferry.bench.work import Work
from kvferry.core.clock import Clock
from kvferry.core.errors import UsageError
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.llm import LLM
from kvferry.engine.messages import EngineRequest
from kvferry.engine.models.build import level_of
from kvferry.engine.models.compiled import CompiledTransformer
from kvferry.engine.step import StepPlan


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of some milliseconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: list[float]) -> "Percentiles":
        """Of these; zeros where there are none."""
        if not seconds:
            return cls(0.0, 0.0, 0.0)
        ordered = sorted(seconds)
        return cls(*(1e3 * ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in (0.5, 0.9, 0.99)))


@dataclass(frozen=True, slots=True)
class Run:
    """One size: medians over the rounds."""

    batch: int
    input_tokens: int
    output_tokens: int
    ttft_ms: float
    """Until every request has its first token."""
    itl_ms: Percentiles
    """Between tokens, once every request has one."""
    tokens_per_second: float
    """Latency: of all requests together, after the first token. Throughput: output over the whole time."""
    bound_tokens_per_second: float
    share_of_bound: float
    least: float
    most: float
    """Tokens a second of the slowest and the fastest round."""


@dataclass(frozen=True, slots=True)
class Report:
    """All sizes, and what the machine did beside them."""

    runs: tuple[Run, ...]
    machine: Machine

    def as_json(self) -> dict[str, object]:
        """The public shape."""
        machine = {
            "read_gbps": round(self.machine.read_gbps, 2),
            "bf16_gflops": round(self.machine.gflops, 1),
            "threads": self.machine.threads,
            "level": self.machine.level,
        }
        return {"runs": [as_row(run) for run in self.runs], "machine": machine}


Shape = tuple[int, int]
"""Tokens in, tokens out."""


@dataclass(slots=True)
class _Trip:
    """One round: all requests from their start to their last token."""

    first: float = 0.0
    """Seconds until every request had a token."""
    gaps: list[float] = field(default_factory=list)
    """Seconds of each step after that."""
    drawn: int = 0
    """Tokens of these steps."""
    work: list[Work] = field(default_factory=list)
    """Of every step."""
    seconds: float = 0.0
    """Of all of it."""


class Bench:
    """An engine and the machine under it."""

    def __init__(self, llm: LLM, threads: int, clock: Clock) -> None:
        self._llm = llm
        self._clock = clock
        model = llm.runner.model
        self._measure = measure_machine(
            level_of(model.kernels), threads, clock, of_bytes=model.rounds_inputs, device=model.device
        )
        self._token_bytes = llm.block_bytes // llm.engine.allocator.block_tokens
        self._seen: list[Machine] = []
        self._seed = 0

    def machine(self) -> Machine:
        """Medians over all that was measured beside the runs."""
        seen = self._seen or [self._measure()]
        return Machine(
            statistics.median(m.read_gbps for m in seen),
            statistics.median(m.gflops for m in seen),
            seen[0].threads,
            seen[0].level,
        )

    def latency(self, batch: int, shape: Shape, rounds: int, on_round: Callable[[], None]) -> Run:
        """A batch that starts together, and its rate once all of it is decoding."""

        def decoding(trip: _Trip) -> tuple[int, float, list[Work]]:
            return trip.drawn, sum(trip.gaps), trip.work[len(trip.work) - len(trip.gaps) :]

        return self._rounds([shape] * batch, rounds, decoding, on_round)

    def phases(self, shape: Shape, batch: int) -> dict[str, float]:
        """Milliseconds of all threads by phase, for a step of one more such batch once all of it is decoding.

        Raises:
            UsageError: torch computes, which does not say.
        """
        model = self._llm.runner.model
        if not isinstance(model, CompiledTransformer):
            raise UsageError("only the compiled kernels say where a step's time goes", field="phases")
        tokens_in, tokens_out = shape
        self._go([(tokens_in, tokens_out)] * batch, when_decoding=model.phase_seconds)
        return {name: 1e3 * seconds / (tokens_out - 1) for name, seconds in model.phase_seconds().items()}

    def steps(self, batch: int, shape: Shape) -> list[tuple[float, Work]]:
        """Seconds and work of each step of one more such batch, once all of it is decoding."""
        trip = self._go([shape] * batch)
        return list(zip(trip.gaps, trip.work[len(trip.work) - len(trip.gaps) :], strict=True))

    def throughput(self, shapes: list[Shape], rounds: int, on_round: Callable[[], None]) -> Run:
        """Requests of many sizes, all given at once; output tokens over the whole time."""
        outputs = sum(out for _, out in shapes)
        return self._rounds(shapes, rounds, lambda trip: (outputs, trip.seconds, trip.work), on_round)

    def _rounds(
        self,
        shapes: list[Shape],
        rounds: int,
        counted: "Callable[[_Trip], tuple[int, float, list[Work]]]",
        on_round: Callable[[], None],
    ) -> Run:
        """The same requests round after round; `counted` says which tokens, seconds and steps make the rate."""
        ttft: list[float] = []
        gaps: list[float] = []
        rates: list[float] = []
        bounds: list[float] = []
        for number in range(rounds + 1):
            machine = self._measure()
            trip = self._go(shapes)
            on_round()
            if not number:
                continue  # what is touched for the first time
            self._seen.append(machine)
            ttft.append(trip.first)
            gaps += trip.gaps
            tokens, seconds, work = counted(trip)
            if tokens:
                rates.append(tokens / seconds)
                bounds.append(tokens / sum(machine.seconds(w) for w in work))
        rate, bound = (statistics.median(found) if found else 0.0 for found in (rates, bounds))
        shares = [r / b for r, b in zip(rates, bounds, strict=True)]
        return Run(
            batch=len(shapes),
            input_tokens=sum(tokens_in for tokens_in, _ in shapes) // len(shapes),
            output_tokens=sum(tokens_out for _, tokens_out in shapes) // len(shapes),
            ttft_ms=1e3 * statistics.median(ttft),
            itl_ms=Percentiles.of(gaps),
            tokens_per_second=rate,
            bound_tokens_per_second=bound,
            share_of_bound=statistics.median(shares) if shares else 0.0,
            least=min(rates, default=0.0),
            most=max(rates, default=0.0),
        )

    def _go(self, shapes: list[Shape], when_decoding: Callable[[], object] = lambda: None) -> "_Trip":
        """One round; `when_decoding` is called once every request has a token."""
        engine, config, clock = self._llm.engine, self._llm.config, self._clock
        waiting: set[RequestId] = set()
        for tokens_in, tokens_out in shapes:
            self._seed += 1
            name = RequestId(f"bench-{self._seed}")
            params = SamplingParams(temperature=0.0, max_tokens=tokens_out, ignore_eos=True)
            engine.add(EngineRequest(name, random_tokens(config, tokens_in, self._seed), params))
            waiting.add(name)
        trip = _Trip()
        self._llm.runner.watch = lambda plan: trip.work.append(self._work(plan))
        begun = clock.monotonic()
        while engine.has_work:
            started = clock.monotonic()
            result = engine.step()
            ended = clock.monotonic()
            if waiting:
                waiting -= {update.request_id for update in result.updates}
                trip.first = ended - begun
                if not waiting:
                    when_decoding()
            else:
                trip.gaps.append(ended - started)
                trip.drawn += len(result.updates)
        trip.seconds = clock.monotonic() - begun
        return trip

    def _work(self, plan: StepPlan) -> Work:
        parts = [(s.num_computed, s.num_scheduled) for s in plan.scheduled]
        return step_work(
            self._llm.config,
            weight_bytes=self._llm.runner.model.weight_bytes,
            kv_token_bytes=self._token_bytes,
            rows=sum(now for _, now in parts),
            seen=sum(now * before + now * (now + 1) // 2 for before, now in parts),
            context=sum(before + now for before, now in parts),
            sampled=sum(s.samples for s in plan.scheduled),
        )


def mixed_shapes(count: int) -> list[Shape]:
    """Requests of 32 to 512 tokens in and 16 to 128 out, the same every time."""
    return [(32 + 480 * (7 * i % 16) // 15, 16 + 112 * (5 * i % 8) // 7) for i in range(count)]
