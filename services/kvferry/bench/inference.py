"""`kvferry bench latency|throughput`: an engine in this process, compared with the roofline bound of its steps.

Each round measures the rates of the machine and immediately afterwards the engine, so that both run under the same
load.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.bench.formulas.work import KernelWork
from kvferry.bench.roofline import MachineRates, measure_machine, random_tokens, step_work
from kvferry.bench.rows import as_row
from kvferry.core.clock import Clock
from kvferry.core.errors import UsageError
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.execute.models.build import level_of
from kvferry.engine.execute.models.compiled import CompiledTransformer
from kvferry.engine.offline.llm import LLM
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.step.step import StepPlan


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of durations in milliseconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: list[float]) -> "Percentiles":
        """Compute the percentiles of these durations; all are zero if there are no durations."""
        if not seconds:
            return cls(0.0, 0.0, 0.0)
        ordered = sorted(seconds)
        return cls(*(1e3 * ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in (0.5, 0.9, 0.99)))


@dataclass(frozen=True, slots=True)
class BenchmarkRun:
    """Results of one benchmark configuration: medians over the rounds."""

    batch: int
    input_tokens: int
    output_tokens: int
    ttft_ms: float
    """Time in milliseconds until every request has its first token."""
    itl_ms: Percentiles
    """Inter-token latency once every request has its first token."""
    tokens_per_second: float
    """Latency benchmark: output tokens per second of the batch after the first tokens. Throughput benchmark: output
    tokens per second over the whole run."""
    bound_tokens_per_second: float
    share_of_bound: float
    least: float
    most: float
    """Tokens per second of the fastest round; `least` is the value of the slowest round."""


@dataclass(frozen=True, slots=True)
class BenchmarkReport:
    """Results of all configurations, and the rates of the machine."""

    runs: tuple[BenchmarkRun, ...]
    machine: MachineRates

    def as_json(self) -> dict[str, object]:
        """Return the JSON object that `--json` writes."""
        machine = {
            "read_gbps": round(self.machine.read_gbps, 2),
            "bf16_gflops": round(self.machine.gflops, 1),
            "threads": self.machine.threads,
            "level": self.machine.level,
        }
        return {"runs": [as_row(run) for run in self.runs], "machine": machine}


Shape = tuple[int, int]
"""Number of input tokens and of output tokens of a request."""


@dataclass(slots=True)
class _Trip:
    """Measurements of one round, from the start of all requests to their last token."""

    first: float = 0.0
    """Seconds until every request had its first token."""
    gaps: list[float] = field(default_factory=list)
    """Duration in seconds of each step after the first tokens."""
    drawn: int = 0
    """Number of tokens generated in the steps of `gaps`."""
    work: list[KernelWork] = field(default_factory=list)
    """Minimum bytes and operations of every step of the round."""
    seconds: float = 0.0
    """Duration of the whole round in seconds."""


class Bench:
    """Benchmarks an engine and measures the rates of the machine."""

    def __init__(self, llm: LLM, threads: int, clock: Clock) -> None:
        self._llm = llm
        self._clock = clock
        model = llm.model
        self._measure = measure_machine(
            level_of(model.kernels), threads, clock, of_bytes=model.rounds_inputs, device=model.device
        )
        self._token_bytes = llm.token_bytes
        self._seen: list[MachineRates] = []
        self._seed = 0

    def machine(self) -> MachineRates:
        """Return the medians of the machine's rates over all rounds."""
        seen = self._seen or [self._measure()]
        return MachineRates(
            statistics.median(m.read_gbps for m in seen),
            statistics.median(m.gflops for m in seen),
            seen[0].threads,
            seen[0].level,
        )

    def latency(self, batch: int, shape: Shape, rounds: int, on_round: Callable[[], None]) -> BenchmarkRun:
        """Measure a batch of simultaneous requests: latency, and the token rate while all requests decode.

        Args:
            batch: number of requests.
            shape: numbers of input and output tokens of a request.
            rounds: number of measured rounds.
            on_round: called after each round.
        """

        def decoding(trip: _Trip) -> tuple[int, float, list[KernelWork]]:
            return trip.drawn, sum(trip.gaps), trip.work[len(trip.work) - len(trip.gaps) :]

        return self._rounds([shape] * batch, rounds, decoding, on_round)

    def phases(self, shape: Shape, batch: int) -> dict[str, float]:
        """Run a batch and return the milliseconds of a decode step by phase, summed over threads.

        Args:
            shape: prompt and output length of each sequence, in tokens.
            batch: number of sequences.

        Raises:
            UsageError: the engine uses torch kernels, which do not report phases.
        """
        model = self._llm.model
        if not isinstance(model, CompiledTransformer):
            raise UsageError("only the compiled kernels report the time of a step's phases", field="phases")
        tokens_in, tokens_out = shape
        self._go([(tokens_in, tokens_out)] * batch, when_decoding=model.phase_seconds)
        return {name: 1e3 * seconds / (tokens_out - 1) for name, seconds in model.phase_seconds().items()}

    def steps(self, batch: int, shape: Shape) -> list[tuple[float, KernelWork]]:
        """Run a batch and return the time in seconds and the work of each decode step.

        Args:
            batch: number of sequences.
            shape: prompt and output length of each sequence, in tokens.
        """
        trip = self._go([shape] * batch)
        return list(zip(trip.gaps, trip.work[len(trip.work) - len(trip.gaps) :], strict=True))

    def throughput(self, shapes: list[Shape], rounds: int, on_round: Callable[[], None]) -> BenchmarkRun:
        """Measure the output tokens per second of requests with different sizes that start simultaneously, over the
        whole run.

        Args:
            shapes: prompt and output length of each request, in tokens.
            rounds: number of repetitions.
            on_round: called after each round.
        """
        outputs = sum(out for _, out in shapes)
        return self._rounds(shapes, rounds, lambda trip: (outputs, trip.seconds, trip.work), on_round)

    def _rounds(
        self,
        shapes: list[Shape],
        rounds: int,
        counted: "Callable[[_Trip], tuple[int, float, list[KernelWork]]]",
        on_round: Callable[[], None],
    ) -> BenchmarkRun:
        """Run the same requests in each round; `counted` returns the tokens, seconds and step work from which the rate
        is computed."""
        ttft: list[float] = []
        gaps: list[float] = []
        rates: list[float] = []
        bounds: list[float] = []
        for number in range(rounds + 1):
            machine = self._measure()
            trip = self._go(shapes)
            on_round()
            if not number:
                continue  # warm-up
            self._seen.append(machine)
            ttft.append(trip.first)
            gaps += trip.gaps
            tokens, seconds, work = counted(trip)
            if tokens:
                rates.append(tokens / seconds)
                bounds.append(tokens / sum(machine.seconds(w) for w in work))
        rate, bound = (statistics.median(found) if found else 0.0 for found in (rates, bounds))
        shares = [r / b for r, b in zip(rates, bounds, strict=True)]
        return BenchmarkRun(
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
        """Run a round; `when_decoding` is called once, when every request has its first token."""
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
                trip.drawn += sum(len(update.tokens) for update in result.updates)
        trip.seconds = clock.monotonic() - begun
        return trip

    def _work(self, plan: StepPlan) -> KernelWork:
        parts = [(s.num_computed, s.num_scheduled) for s in plan.scheduled]
        return step_work(
            self._llm.config,
            weight_bytes=self._llm.model.weight_bytes,
            kv_token_bytes=self._token_bytes,
            rows=sum(now for _, now in parts),
            seen=sum(now * before + now * (now + 1) // 2 for before, now in parts),
            context=sum(before + now for before, now in parts),
            sampled=sum(s.num_sampled for s in plan.scheduled),
        )


def mixed_shapes(count: int) -> list[Shape]:
    """Return a fixed list of requests with 32 to 512 input and 16 to 128 output tokens."""
    return [(32 + 480 * (7 * i % 16) // 15, 16 + 112 * (5 * i % 8) // 7) for i in range(count)]
