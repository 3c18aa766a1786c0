"""`kvferry bench latency|throughput`: one engine in this process, against the bound of its own steps.

Each round measures the machine first and the engine right after it, so that both meet the same neighbours.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

from kvferry.bench.roofline import Machine, Work, level_of, measure_machine, random_tokens, step_work
from kvferry.core.clock import Clock
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.llm import LLM
from kvferry.engine.messages import EngineRequest
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
        return {"runs": [_rounded(asdict(run)) for run in self.runs], "machine": machine}


Shape = tuple[int, int]
"""Tokens in, tokens out."""


class Bench:
    """An engine and the machine under it."""

    def __init__(self, llm: LLM, threads: int, clock: Clock) -> None:
        self._llm = llm
        self._clock = clock
        self._measure = measure_machine(level_of(llm.runner.model.kernels), threads, clock)
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
        ttft, gaps, rates, bounds = [], [], [], []
        for number in range(rounds + 1):
            machine = self._measure()
            first, steps, work = self._go([shape] * batch)
            on_round()
            if not number:
                continue  # what is touched for the first time
            self._seen.append(machine)
            ttft.append(first)
            gaps += steps
            if steps:
                rates.append(batch * len(steps) / sum(steps))
                bounds.append(batch * len(steps) / sum(w.seconds(machine) for w in work[-len(steps) :]))
        return _run(batch, shape, ttft, gaps, rates, bounds)

    def throughput(self, shapes: list[Shape], rounds: int, on_round: Callable[[], None]) -> Run:
        """Requests of many sizes, all given at once; output tokens over the whole time."""
        outputs = sum(out for _, out in shapes)
        ttft, gaps, rates, bounds = [], [], [], []
        for number in range(rounds + 1):
            machine = self._measure()
            begun = self._clock.monotonic()
            first, steps, work = self._go(shapes)
            spent = self._clock.monotonic() - begun
            on_round()
            if not number:
                continue
            self._seen.append(machine)
            ttft.append(first)
            gaps += steps
            rates.append(outputs / spent)
            bounds.append(outputs / sum(w.seconds(machine) for w in work))
        mean = (sum(i for i, _ in shapes) // len(shapes), outputs // len(shapes))
        return _run(len(shapes), mean, ttft, gaps, rates, bounds)

    def _go(self, shapes: list[Shape]) -> tuple[float, list[float], list[Work]]:
        """Seconds to the last first token, seconds of the steps after it, and each step's work."""
        engine, config, clock = self._llm.engine, self._llm.config, self._clock
        lengths: dict[RequestId, int] = {}
        waiting: set[RequestId] = set()
        for tokens_in, tokens_out in shapes:
            self._seed += 1
            name = RequestId(f"bench-{self._seed}")
            params = SamplingParams(temperature=0.0, max_tokens=tokens_out, ignore_eos=True)
            engine.add(EngineRequest(name, random_tokens(config, tokens_in, self._seed), params))
            lengths[name] = tokens_in
            waiting.add(name)
        gaps: list[float] = []
        work: list[Work] = []
        self._llm.runner.watch = lambda plan: work.append(self._work(plan))
        begun, first = clock.monotonic(), 0.0
        while engine.has_work:
            started = clock.monotonic()
            result = engine.step()
            ended = clock.monotonic()
            if waiting:
                waiting -= {update.request_id for update in result.updates}
                first = ended - begun
            else:
                gaps.append(ended - started)
        return first, gaps, work

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


def _run(
    batch: int, shape: Shape, ttft: list[float], gaps: list[float], rates: list[float], bounds: list[float]
) -> Run:
    rate, bound = (statistics.median(found) if found else 0.0 for found in (rates, bounds))
    shares = [r / b for r, b in zip(rates, bounds, strict=True)]
    return Run(
        batch=batch,
        input_tokens=shape[0],
        output_tokens=shape[1],
        ttft_ms=1e3 * statistics.median(ttft),
        itl_ms=Percentiles.of(gaps),
        tokens_per_second=rate,
        bound_tokens_per_second=bound,
        share_of_bound=statistics.median(shares) if shares else 0.0,
        least=min(rates, default=0.0),
        most=max(rates, default=0.0),
    )


def _rounded(values: dict[str, object]) -> dict[str, object]:
    def one(value: object) -> object:
        if isinstance(value, dict):
            return {k: one(v) for k, v in value.items()}
        return round(value, 4) if isinstance(value, float) else value

    return {name: one(value) for name, value in values.items()}
