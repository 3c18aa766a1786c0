"""Request rates that a worker serves at equal latency, with pages and with baselines."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from statistics import geometric_mean

from harness.results.memory import makers, requests
from harness.results.one_worker import BASELINES, CONTEXT, PAGED, reserving, serve, settings_of, static
from harness.results.rows import Outcome
from kvferry.bench.workload.arrivals import Arrivals
from kvferry.bench.workload.lengths import ALPACA, SHAREGPT, UNIFORM, LengthMix
from kvferry.simulator.requests.demand import Demand, SimRequest
from kvferry.simulator.requests.tokens import Tape
from kvferry.simulator.worker.jobs import ReplicaSettings
from kvferry.simulator.worker.replica import MakeScheduler

TAPE = Tape(0)
Draw = Callable[[float], Sequence[SimRequest]]
"""Draws the requests of a trace at a rate."""
ORACLE, LARGE = "Orca (Oracle)", 1 << 20


def capacity(
    draw: Draw, make: MakeScheduler | None, *, limit: float, start: float, settings: ReplicaSettings, samples: int = 1
) -> float:
    """Return the highest rate whose mean normalized latency is within the limit, to 5 percent.

    Args:
        limit: seconds per output token.
        start: a rate within the limit, or not far above it.
    """

    def holds(rate: float) -> bool:
        served = serve(draw(rate), settings, make_scheduler=make, samples=samples)
        return served.normalized_latency <= limit

    low, high = start, start
    while not holds(low):
        high, low = low, low / 1.6
    if high == low:
        high = low * 1.6
        while holds(high):
            low, high = high, high * 1.6
    while high / low > 1.05:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def trace(kind: str, seconds: float, seed: int = 1) -> Draw:
    """Return a trace of a duration with the lengths of a data set."""
    return lambda rate: requests(kind, max(30, int(rate * seconds)), rate, seed)


@cache
def sharegpt_capacities() -> dict[str, float]:
    """Return the rate of each system for ShareGPT-like lengths at 0.1 seconds per token."""
    systems: dict[str, MakeScheduler | None] = {**makers(), "static batches": static()}
    starts = {PAGED: 2.0, ORACLE: 0.9, "Orca (Pow2)": 0.7, "Orca (Max)": 0.5, "static batches": 0.15}
    return {
        name: capacity(trace(SHAREGPT, 400.0), make, limit=0.1, start=starts[name], settings=settings_of())
        for name, make in systems.items()
    }


def rates() -> Outcome:
    """Compare rates at equal latency for ShareGPT-like lengths."""
    found = sharegpt_capacities()
    paged = found[PAGED]
    ratios = {name: paged / rate for name, rate in found.items() if name != PAGED}
    worst = max(ratios, key=lambda name: ratios[name])
    return Outcome(
        f"{paged:.2f} requests/s within 0.1 s per token; "
        + ", ".join(f"{ratio:.2f} times {name}" for name, ratio in ratios.items()),
        ratios[ORACLE] >= 1.5 and ratios["Orca (Max)"] >= 2.5 and worst == "static batches",
    )


def overall() -> Outcome:
    """Aggregate the ratios of the workloads over the three reserving baselines."""
    ratios = [sharegpt_capacities()[PAGED] / sharegpt_capacities()[name] for name in BASELINES]
    ratios += chat_ratios()[0]
    ratios += [ratio for n in (2, 4) if (ratio := sample_ratio(n))]
    ratios += [prefix_ratio(tokens) for tokens in (80, 341)]
    mean = geometric_mean(ratios)
    return Outcome(
        f"geometric mean {mean:.2f} over {len(ratios)} ratios, from {min(ratios):.2f} to {max(ratios):.2f}", mean >= 2.0
    )


def compute_bound() -> Outcome:
    """Compare paged and reserved memory in a workload that never fills the memory."""
    found = {}
    for name, make in ((PAGED, None), (ORACLE, reserving(BASELINES[ORACLE], LARGE))):
        found[name] = capacity(trace(ALPACA, 30.0), make, limit=0.1, start=25.0, settings=settings_of(slots=LARGE))
    ratio = found[PAGED] / found[ORACLE]
    return Outcome(f"{ratio:.2f} times {ORACLE} with a million slots", ratio < 1.2)


@cache
def sample_ratio(samples: int) -> float:
    """Return the rate of the production scheduler divided by that of Oracle, which shares no pages, for a number of
    samples of each request."""
    rates_found = [
        capacity(
            trace(ALPACA, 40.0), make, limit=0.1, start=24.0 / samples / (1 if make is None else 2),
            settings=settings_of(), samples=samples,
        )
        for make in (None, reserving(BASELINES[ORACLE]))
    ]  # fmt: skip
    return rates_found[0] / rates_found[1]


def samples() -> Outcome:
    """Compare the gain over Oracle for one and several samples of each prompt."""
    ratios = {n: sample_ratio(n) for n in (1, 2, 4, 6)}
    values = list(ratios.values())
    return Outcome(
        ", ".join(f"{ratio:.2f} times Oracle with {n}" for n, ratio in ratios.items()),
        all(b > a for a, b in pairwise(values)),
        "parallel samples only, since beams need the scores of a model. A prompt of 19 tokens has one full block to "
        "share, and within 0.1 s per token the worker is bound by computing before samples fill its memory",
    )


@cache
def prefix_ratio(num_prefix: int) -> float:
    """Return the rate of the production scheduler divided by that of Oracle, for translation requests whose prompts
    begin with the same `num_prefix` tokens."""

    def draw(rate: float) -> Sequence[SimRequest]:
        mix = LengthMix(UNIFORM, num_input=25, num_output=30, spread=0.5)
        return list(Demand(mix, int(40 * rate), Arrivals(rate=rate), num_prefix=num_prefix).requests(TAPE, 1))

    found = [
        capacity(draw, make, limit=0.1, start=start, settings=settings_of())
        for make, start in ((None, 25.0), (reserving(BASELINES[ORACLE]), 12.0))
    ]
    return found[0] / found[1]


def shared_prefix() -> Outcome:
    """Compare rates for prompts with a common prefix of 80 and of 341 tokens."""
    short, long = prefix_ratio(80), prefix_ratio(341)
    return Outcome(
        f"{short:.2f} times Oracle with 80 tokens, {long:.2f} times with 341",
        short >= 1.3 and long >= 2.5 and long > short,
    )


def _chat(rate: float, *, keeps: bool) -> Sequence[SimRequest]:
    """Draw rounds of chats whose prompts have 1,024 tokens. If `keeps`, a prompt contains the earlier rounds of its
    chat."""
    if keeps:
        mix = LengthMix(UNIFORM, num_input=120, num_output=200, spread=0.5)
        count = max(40, int(400 * rate))
        demand = Demand(
            mix, count, Arrivals(rate=rate / 4), num_turns=4, turn_seconds=30.0, num_prefix=560, num_prefixes=1 << 16
        )
        return list(demand.requests(TAPE, 1))
    mix = LengthMix(UNIFORM, num_input=1024, num_output=200)
    return list(Demand(mix, max(40, int(400 * rate)), Arrivals(rate=rate)).requests(TAPE, 1))


@cache
def chat_ratios() -> tuple[list[float], float]:
    """Return the highest rate relative to each baseline that reserves memory, and the ratio of the highest rates with
    and without KV that is kept between rounds.
    """

    def plain(rate: float) -> Sequence[SimRequest]:
        return _chat(rate, keeps=False)

    def kept(rate: float) -> Sequence[SimRequest]:
        return _chat(rate, keeps=True)

    paged = capacity(plain, None, limit=0.1, start=1.0, settings=settings_of())
    others = [
        capacity(plain, reserving(rule), limit=0.1, start=0.6, settings=settings_of()) for rule in BASELINES.values()
    ]
    return [paged / other for other in others], capacity(kept, None, limit=0.1, start=1.0, settings=settings_of()) / (
        paged
    )


def chat() -> Outcome:
    """Compare rates of chats with prompts of 1,024 tokens."""
    ratios, kept = chat_ratios()
    return Outcome(
        f"{min(ratios):.2f} to {max(ratios):.2f} times the three baselines; {kept:.2f} times the paged rate if the KV "
        "of earlier rounds stays in the prefix cache",
        min(ratios) >= 1.3 and kept > 1.0,
        f"outputs have 200 tokens, and each baseline reserves a chunk of {CONTEXT} slots. Keeping earlier rounds gains "
        "nothing in this memory: a dozen conversations fill it, and pages are evicted in the 30 s to the next round",
    )
