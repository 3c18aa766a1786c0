"""Memory of the KV cache: the share that holds tokens, and the number of requests that fit."""

import math
from collections import Counter
from statistics import median

from harness.results.one_worker import (
    BASELINES,
    CONTEXT,
    PAGED,
    SLOTS,
    Served,
    reserving,
    serve,
    settings_of,
)
from harness.results.rows import Outcome
from kvferry.bench.workload.arrivals import Arrivals
from kvferry.bench.workload.lengths import ALPACA, SHAREGPT, LengthMix
from kvferry.engine.schedule.step.step import StepPlan
from kvferry.simulator.requests.demand import Demand, SimRequest
from kvferry.simulator.requests.tokens import Tape
from kvferry.simulator.worker.replica import MakeScheduler, SimulatedReplica

TAPE = Tape(0)
ORIGINAL_SHARES = {"Orca (Max)": 20.4, "Orca (Pow2)": 26.8, "Orca (Oracle)": 38.2, PAGED: 96.3}


def requests(kind: str, count: int, rate: float, seed: int) -> list[SimRequest]:
    """Draw requests with the lengths of a trace."""
    return list(Demand(LengthMix(kind, max_tokens=CONTEXT), count, Arrivals(rate=rate)).requests(TAPE, seed))


def makers() -> dict[str, MakeScheduler | None]:
    """Return the creators of the schedulers by name; `None` for the production one."""
    return {**{name: reserving(rule) for name, rule in BASELINES.items()}, PAGED: None}


def _useful_share(name: str, seed: int) -> float:
    """Return the share of all slots that hold the KV of tokens, over time, while requests always wait."""
    held = seconds_seen = 0.0

    def observe(replica: SimulatedReplica, plan: StepPlan, seconds: float) -> None:
        nonlocal held, seconds_seen
        if replica.scheduler.num_waiting:  # the first and last steps, in which memory is not full, are excluded
            held += seconds * sum(item.num_computed + item.num_scheduled for item in plan.scheduled)
            seconds_seen += seconds

    serve(requests(SHAREGPT, 400, 1e6, seed), settings_of(), make_scheduler=makers()[name], observer=observe)
    return held / seconds_seen / SLOTS


def useful_shares() -> Outcome:
    """Compare the share of the KV memory that holds tokens under four allocators."""
    found = {name: 100 * median(_useful_share(name, seed) for seed in range(3)) for name in ORIGINAL_SHARES}
    ordered = list(found.values())
    is_ordered = ordered == sorted(ordered)
    far = [name for name, original in ORIGINAL_SHARES.items() if abs(found[name] - original) > 5]
    return Outcome(
        ", ".join(f"{name} {share:.1f} %" for name, share in found.items()),
        is_ordered and not far and found[PAGED] >= 95,
        f"more than 5 points from the original: {', '.join(far)}" if far else "",
    )


def waste_bound() -> Outcome:
    """Check after every step that each sequence wastes less than a block, and that the pool's invariants hold."""
    checked, most = 0, 0

    def observe(replica: SimulatedReplica, plan: StepPlan, seconds: float) -> None:
        nonlocal checked, most
        for item in plan.scheduled:
            most = max(most, len(item.block_ids) * 16 - item.num_computed - item.num_scheduled)
            checked += 1
        replica.allocator.check_integrity()

    limits = settings_of(slots=1600).limits
    for seed in range(3):
        serve(requests(ALPACA, 60, 20.0, seed), settings_of(slots=1600, limits=limits), observer=observe)
    return Outcome(f"at most {most} unused slots per sequence, over {checked} sequence steps", most < 16)


def _batches(kind: str, rate: float, seconds: float, seed: int) -> dict[str, float]:
    some = requests(kind, int(rate * seconds), rate, seed)
    found: dict[str, float] = {}
    for name, make in makers().items():
        served: Served = serve(some, settings_of(), make_scheduler=make, until=seconds)
        found[name] = served.mean_batch
    return found


def batched_requests() -> Outcome:
    """Compare the mean number of requests in a step at the same rates."""
    rows: list[str] = []
    ratios: Counter[str] = Counter()
    for kind, rate, seconds in ((SHAREGPT, 2.0, 400.0), (ALPACA, 30.0, 40.0)):
        drawn = [_batches(kind, rate, seconds, seed) for seed in range(2)]
        found = {name: median(one[name] for one in drawn) for name in drawn[0]}
        rows.append(f"{kind} at {rate:g}/s: " + ", ".join(f"{name} {value:.1f}" for name, value in found.items()))
        if kind == SHAREGPT:
            ratios = Counter({name: found[PAGED] / value for name, value in found.items()})
    passed = ratios["Orca (Oracle)"] >= 1.8 and ratios["Orca (Max)"] >= 3.5
    rows.append(f"ratios {ratios['Orca (Oracle)']:.2f} to Oracle, {ratios['Orca (Max)']:.2f} to Max")
    return Outcome("; ".join(rows), passed)


def block_sizes() -> Outcome:
    """Compare the throughput of a saturated worker over block sizes."""
    parts, passed, why = [], True, []
    for kind, count in ((SHAREGPT, 150), (ALPACA, 1200)):
        rates: dict[int, float] = {}
        for block in (1, 8, 16, 32, 64, 128, 256):
            served = serve(requests(kind, count, 1e6, 1), settings_of(block=block))
            rates[block] = served.completed / served.ended_at
        best = max(rates.values())
        parts.append(f"{kind}: " + ", ".join(f"{block} {100 * rate / best:.0f} %" for block, rate in rates.items()))
        if rates[16] < 0.95 * best:
            passed = False
            why.append(f"{kind}: 16 is more than 5 % below the best")
        if kind == ALPACA and rates[256] > 0.8 * best:
            passed = False
            why.append("alpaca: 256 is not clearly worse")
    why.append(
        "the row compares memory only: a step's time does not depend on the block size here, as it does in a kernel"
    )
    return Outcome("share of the best rate by block size: " + "; ".join(parts), passed, "; ".join(why))


def kv_sizes() -> Outcome:
    """Compute the published sizes of KV caches by the layout of pages."""
    from kvferry.kv.pages.layout import KvLayout

    sizes = []
    for layers, heads, head_dim in ((40, 40, 128), (100, 8, 128)):
        layout = KvLayout(
            num_layers=layers, num_kv_heads=heads, head_dim=head_dim, block_tokens=16, dtype="float16", model_digest=""
        )
        sizes.append(layout.block_bytes // 16)
    exact = [2 * 40 * 40 * 128 * 2, 2 * 100 * 8 * 128 * 2]
    seconds = 100_000 * sizes[1] / 3.35e12
    return Outcome(
        f"{sizes[0] / 1024:g} KiB a token and {sizes[0] * 2048 / 2**30:.4g} GiB for 2,048 tokens of OPT-13B; "
        f"{sizes[1]:,} B a token, {100_000 * sizes[1] / 1e9:.3g} GB and {1e3 * seconds:.3g} ms for 100,000",
        sizes == exact and math.isclose(seconds, 0.0122, rel_tol=0.01),
    )
