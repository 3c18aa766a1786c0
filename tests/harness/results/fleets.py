"""Fleets: prefill and decode apart or together, and routing policies."""

from collections.abc import Mapping

from harness.results.rows import Outcome
from kvferry.bench.workload.arrivals import BURST, Arrivals
from kvferry.bench.workload.lengths import SHAREGPT, UNIFORM, LengthMix
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.gateway.decide.config import PolicyName, RoutingConfig
from kvferry.kv.pricing.price import LoadPolicy
from kvferry.simulator.fleet.fleet import PoolResult, SimulatedPool, SimulatedPoolSpec, SimulatedRoleSpec
from kvferry.simulator.fleet.runs import GatewaySettings
from kvferry.simulator.requests.demand import Demand
from kvferry.simulator.requests.tokens import Tape
from kvferry.simulator.worker.device import DeviceProfile, LinkProfile
from kvferry.simulator.worker.jobs import ReplicaSettings

TAPE = Tape(0)
DEVICE = DeviceProfile(step=0.005, token=3.2e-5, kv_token=3.9e-8)
"""An 8-billion-parameter model on an accelerator with 3.35 TB/s and 1,000 TFLOP/s, half of which is used."""
KV_BYTES = 131_072
"""KV of one token: 32 layers, 8 heads of 128, 16 bits."""
LINK = LinkProfile(bytes_per_second=25e9, latency=5e-5)


def _run(
    demand: Demand, roles: Mapping[str, int], policy: PolicyName = "prefix-hash", *, blocks: int = 8192,
    limits: SchedulerLimits | None = None, seed: int = 1,
) -> PoolResult:  # fmt: skip
    engine = ReplicaSettings(
        blocks, 16, 16 * KV_BYTES, limits or SchedulerLimits(8192, 8192, 8192, 256), LoadPolicy.ALWAYS
    )
    spec = SimulatedPoolSpec(
        tuple(SimulatedRoleSpec(role, count, DEVICE, engine) for role, count in roles.items()),
        LINK,
        GatewaySettings(routing=RoutingConfig(policy=policy), slo={"ttft": 1.0, "tpot": 0.03}),
    )
    return SimulatedPool(spec, demand.requests(TAPE, seed)).run()


def disaggregation() -> Outcome:
    """Compare ITL under bursts of long prompts, with prefill and decode on the same workers and apart."""
    mix = LengthMix(UNIFORM, num_input=3000, num_output=200, spread=0.5)
    demand = Demand(mix, 360, Arrivals(BURST, rate=12.0, burst_size=12))
    together = _run(demand, {"both": 4})
    chunked = _run(demand, {"both": 4}, limits=SchedulerLimits(8192, 512, 256, 256))
    apart = _run(demand, {"prefill": 2, "decode": 2})
    expected = sum(-(-len(r.prompt) // 16) * 16 * KV_BYTES for r in demand.requests(TAPE, 1))
    cells = [
        f"{name}: p99 ITL {1e3 * r.measures.itl.percentile(99):.1f} ms, p50 TTFT "
        f"{1e3 * r.measures.ttft.percentile(50):.0f} ms, goodput {r.measures.goodput:.2f}/s"
        for name, r in (("together", together), ("together in chunks", chunked), ("apart", apart))
    ]
    transfers = apart.transfers
    seconds = transfers.seconds / max(1, transfers.transfers)
    moved = transfers.num_bytes == expected and transfers.failures == 0
    p99 = [r.measures.itl.percentile(99) for r in (together, chunked, apart)]
    return Outcome(
        "; ".join(cells) + f"; a transfer takes {1e3 * seconds:.1f} ms, and {transfers.num_bytes / 1e9:.1f} GB were"
        f" moved, {'the whole pages of the prompts' if moved else f'not {expected}'}",
        p99[2] < min(p99[:2]) and moved,
    )


def routing() -> Outcome:
    """Compare routing policies for requests of unequal lengths, and for shared prefixes."""
    policies: tuple[PolicyName, ...] = ("round-robin", "least-loaded", "prefix-hash", "latency")
    heavy = Demand(LengthMix(SHAREGPT), 1200, Arrivals(rate=185.0))
    shared = Demand(LengthMix(UNIFORM, 200, 60, spread=0.5), 900, Arrivals(rate=60.0), num_prefix=3000, num_prefixes=24)
    limits = SchedulerLimits(2048, 512, 512, 64)
    tails: dict[str, float] = {}
    firsts: dict[str, float] = {}
    hits: dict[str, float] = {}
    for policy in policies:
        tails[policy] = 1e3 * _run(heavy, {"both": 8}, policy, limits=limits).measures.ttft.percentile(99)
        measures = _run(shared, {"both": 8}, policy, blocks=4096, limits=limits).measures
        hits[policy], firsts[policy] = 100 * measures.hit_rate, 1e3 * measures.ttft.percentile(99)
    return Outcome(
        "p99 TTFT for unequal lengths: "
        + ", ".join(f"{value:.0f} ms ({name})" for name, value in tails.items())
        + "; with 24 prefixes of 3,000 tokens: "
        + ", ".join(f"{value:.0f} ms and {hits[name]:.0f} % cached ({name})" for name, value in firsts.items()),
        tails["least-loaded"] < tails["round-robin"]
        and min(hits["prefix-hash"], hits["latency"]) > hits["round-robin"]
        and min(firsts["prefix-hash"], firsts["latency"]) < firsts["round-robin"],
        "near saturation and without anything to share, the policies that look at prefixes have a longer tail than "
        "those that do not: this trace is the worst case for them",
    )
