"""Scheduling: head-of-line blocking, starvation, cache hits, preemption, chunks of prompts."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median

from harness.results.memory import requests
from harness.results.one_worker import Served, serve, settings_of
from harness.results.rows import Outcome
from kvferry.bench.workload.arrivals import BURST, Arrivals
from kvferry.bench.workload.lengths import SHAREGPT, UNIFORM, LengthMix
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.schedule.step.step import StepPlan
from kvferry.simulator.requests.demand import Demand, SimRequest
from kvferry.simulator.requests.tokens import Output, Tape
from kvferry.simulator.worker.device import DeviceProfile
from kvferry.simulator.worker.replica import SimulatedReplica

TAPE = Tape(0)
BUDGET = 8192
POLICIES = ("fcfs", "two-level", "srtf")
FAST = DeviceProfile(step=0.005, token=2e-5, kv_token=1e-8)
"""An accelerator on which a full budget of 8,192 tokens takes 0.17 s."""


def _limits(policy: str = "fcfs", chunk: int = BUDGET, *, budget: int = BUDGET, mixed: int = BUDGET) -> SchedulerLimits:
    return SchedulerLimits(budget, chunk, mixed, max_num_seqs=256, scheduling=policy)


def _one(number: int, at: float, num_input: int, num_output: int) -> SimRequest:
    return SimRequest(number, at, TAPE.unique(number, num_input), Output.of(TAPE, number, num_output))


def _first_steps(limits: SchedulerLimits) -> tuple[int, int]:
    """Return the steps in which a prompt of 100 tokens and one of 100,000 before it have their first tokens."""
    steps: list[float] = []

    def observe(replica: SimulatedReplica, plan: StepPlan, seconds: float) -> None:
        steps.append(replica._clock.now)

    served = serve(
        [_one(0, 0.0, 100_000, 2), _one(1, 0.0, 100, 30)], settings_of(slots=160_000, limits=limits),
        profile=FAST, observer=observe,
    )  # fmt: skip
    return tuple(1 + steps.index(served.first_at[name]) for name in ("1", "0"))  # type: ignore[return-value]


def _mean_ttft(limits: SchedulerLimits, seed: int) -> float:
    """Return the mean TTFT on a prefill worker for prompts of which one in twenty is very long."""
    short = Demand(LengthMix(SHAREGPT), 570, Arrivals(rate=20.0)).requests(TAPE, seed)
    long = Demand(LengthMix(UNIFORM, 24_000, 1, spread=0.3), 30, Arrivals(rate=1.05)).requests(TAPE, seed + 100)
    both = sorted([*short, *long], key=lambda request: request.at)
    unique = [_one(number, request.at, len(request.prompt), 1) for number, request in enumerate(both)]
    return serve(unique, settings_of(slots=400_000, limits=limits), profile=FAST).ttft.mean


def head_of_line() -> Outcome:
    """Compare policies for a long prompt before a short one, and for a heavy-tailed trace."""
    whole = {policy: _first_steps(_limits(policy)) for policy in POLICIES}
    means = {policy: median(_mean_ttft(_limits(policy), seed) for seed in range(3)) for policy in POLICIES}
    means["fcfs in chunks of 4,096"] = median(_mean_ttft(_limits(chunk=4096), seed) for seed in range(3))
    passed = means["srtf"] <= 1.02 * means["two-level"] and means["two-level"] < means["fcfs"]
    return Outcome(
        "first token of the short prompt in step "
        + ", ".join(f"{short} ({policy}), long in {long}" for policy, (short, long) in whole.items())
        + "; mean TTFT of a heavy-tailed trace on a prefill worker "
        + ", ".join(f"{1e3 * mean:.0f} ms ({name})" for name, mean in means.items()),
        passed and whole == {"fcfs": (13, 13), "two-level": (1, 13), "srtf": (1, 13)},
        "with decoding sequences in the batch, fcfs here leaves half of a step's prompt tokens to later prompts, and "
        "the policies hardly differ; on a prefill worker nothing decodes",
    )


def no_starvation() -> Outcome:
    """Send a long prompt within a stream of 1,200 short ones, and measure how long it waits."""
    waits = {}
    for policy in POLICIES:
        stream = [_one(number + 1, 0.02 * number, 400, 40) for number in range(1200)]
        served = serve(
            sorted([_one(0, 1.0, 6000, 10), *stream], key=lambda r: r.at),
            settings_of(slots=200_000, limits=replace(_limits(policy, budget=512, chunk=512), max_num_seqs=12)),
            profile=FAST,
        )
        waits[policy] = served.first_at["0"] - 1.0
    return Outcome(
        ", ".join(f"{wait:.1f} s with {policy}" for policy, wait in waits.items()),
        waits["two-level"] < 0.5 * waits["srtf"],
        "the stream ends after 24 s, when srtf starts the long prompt; two-level compares the first eight prompts "
        "only, which also bounds a choice to eight cache lookups",
    )


def _turns(seed: int) -> Sequence[SimRequest]:
    mix = LengthMix(UNIFORM, num_input=200, num_output=60, spread=0.9)
    return list(
        Demand(mix, 500, Arrivals(BURST, rate=9.0, burst_size=24), num_turns=4, turn_seconds=4.0, num_prefix=400,
               num_prefixes=12).requests(TAPE, seed)
    )  # fmt: skip


def _hit_rate(policy: str, seed: int) -> float:
    limits = replace(_limits(policy, budget=1024, chunk=512), max_num_seqs=24)
    served = serve(_turns(seed), settings_of(slots=24_000, limits=limits), profile=FAST)
    assert served.replica is not None
    hit, queried = served.replica.hits
    return hit / queried


def hit_rates() -> Outcome:
    """Compare the share of cached prompt tokens for conversations under memory pressure."""
    found = {policy: fmean(_hit_rate(policy, seed) for seed in range(3)) for policy in POLICIES}
    passed = found["srtf"] > found["fcfs"] and found["two-level"] > found["fcfs"]
    return Outcome(
        ", ".join(f"{100 * share:.1f} % with {policy}" for policy, share in found.items()),
        passed,
        "" if passed else "with each policy, cached prompts of this trace are served before they are evicted",
    )


def recovery() -> Outcome:
    """Count the steps that a preempted sequence needs until it continues."""
    started: dict[str, int] = {}
    found: list[tuple[int, int]] = []

    def observe(replica: SimulatedReplica, plan: StepPlan, seconds: float) -> None:
        for item in plan.scheduled:
            sequence = replica.scheduler._known[item.request_id]
            if sequence.num_preemptions and sequence.sampling.num_generated:
                key = f"{item.request_id}/{sequence.num_preemptions}"
                started[key] = started.get(key, 0) + (0 if key in started and started[key] < 0 else 1)
                if item.num_sampled and started[key] > 0:
                    found.append((started[key], sequence.sampling.num_generated))
                    started[key] = -1

    for seed in range(3):
        serve(requests(SHAREGPT, 80, 1e6, seed), settings_of(slots=6000), observer=observe)
    steps, outputs = [one for one, _ in found], [generated for _, generated in found]
    return Outcome(
        f"{len(found)} resumptions, each in {max(steps, default=0)} step, with {fmean(outputs or [0]):.0f} generated "
        "tokens on average",
        bool(found) and max(steps) == 1,
    )


def chunks() -> Outcome:
    """Compare inter-token latency while long prompts arrive, with whole prompts and with chunks."""
    streams = [_one(number, 0.05 * number, 100, 400) for number in range(24)]
    prompts = [_one(100 + number, 1.5 + 0.4 * number, 6000, 4) for number in range(6)]
    found: dict[str, Served] = {}
    for name, limits in (("whole", _limits()), ("chunks of 256", _limits(chunk=256, mixed=256))):
        served = serve([*streams, *prompts], settings_of(slots=160_000, limits=limits), profile=FAST)
        found[name] = served
    bound = FAST.step + FAST.token * (256 + 30) + FAST.kv_token * 60_000
    whole, chunked = (1e3 * served.itl.percentile(99) for served in found.values())
    return Outcome(
        f"p99 of ITL {whole:.0f} ms with whole prompts, {chunked:.1f} ms with chunks; largest "
        f"{1e3 * found['chunks of 256'].itl.largest:.1f} ms; mean TTFT {1e3 * found['whole'].ttft.mean:.0f} and "
        f"{1e3 * found['chunks of 256'].ttft.mean:.0f} ms",
        chunked < whole and found["chunks of 256"].itl.largest <= bound,
    )


def suffix_only() -> Outcome:
    """Count the tokens that the second of two requests with a common prefix computes."""
    computed: list[tuple[str, int]] = []

    def observe(replica: SimulatedReplica, plan: StepPlan, seconds: float) -> None:
        computed.extend((item.request_id, item.num_scheduled) for item in plan.scheduled)

    prefix = TAPE.unique(7, 37)
    both = [
        SimRequest(number, float(number), [*prefix, *TAPE.unique(10 + number, 11)], Output.of(TAPE, number, 1))
        for number in range(2)
    ]
    serve(both, settings_of(slots=1600), observer=observe)
    second = sum(count for name, count in computed if name == "1")
    return Outcome(
        f"{second} of 48 tokens for a common prefix of 37 tokens, which is two full blocks", second == 48 - 32
    )
