"""Rows about splits that follow the mix of requests, and about the defaults of benchmarks."""

from harness.results.fleets import DEVICE, KV_BYTES, LINK, TAPE
from harness.results.rows import Outcome
from kvferry.bench.serving.charts import Curve, Panel
from kvferry.bench.workload.arrivals import Arrivals
from kvferry.bench.workload.lengths import UNIFORM, LengthMix
from kvferry.cli.commands.bench import latency
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.gateway.decide.config import RoutingConfig
from kvferry.kv.pricing.price import LoadPolicy
from kvferry.simulator.fleet.fleet import SimulatedPool, SimulatedPoolSpec, SimulatedRoleSpec
from kvferry.simulator.fleet.runs import GatewaySettings
from kvferry.simulator.requests.demand import Demand
from kvferry.simulator.worker.jobs import ReplicaSettings

_WORKERS = 8
_PHASES = (
    ("long prompts", LengthMix(UNIFORM, 6000, 100, spread=0.3), 16.0),
    ("even", LengthMix(UNIFORM, 2000, 500, spread=0.3), 26.0),
    ("long outputs", LengthMix(UNIFORM, 300, 1500, spread=0.3), 16.0),
)
"""Mix of requests, and their rate per second."""
_COUNT = 400


def _goodput(mix: LengthMix, rate: float, prefill: int) -> float:
    limits = SchedulerLimits(4096, 4096, 4096, 32)
    engine = ReplicaSettings(8192, 16, 16 * KV_BYTES, limits, LoadPolicy.ALWAYS)
    spec = SimulatedPoolSpec(
        (
            SimulatedRoleSpec("prefill", prefill, DEVICE, engine),
            SimulatedRoleSpec("decode", _WORKERS - prefill, DEVICE, engine),
        ),
        LINK,
        GatewaySettings(routing=RoutingConfig(policy="least-loaded"), slo={"ttft": 1.0, "tpot": 0.02}),
    )
    pool = SimulatedPool(spec, Demand(mix, _COUNT, Arrivals(rate=rate)).requests(TAPE, 1)).run()
    return pool.measures.good / _COUNT


def followed_mix() -> Outcome:
    """Compare the best split of each phase with each fixed split over all phases."""
    splits = range(1, _WORKERS)
    shares = {n: [_goodput(mix, rate, n) for _, mix, rate in _PHASES] for n in splits}
    fixed = {n: sum(found) / len(_PHASES) for n, found in shares.items()}
    best_fixed = max(fixed, key=lambda n: fixed[n])
    chosen = [max(splits, key=lambda n: shares[n][phase]) for phase in range(len(_PHASES))]
    followed = sum(shares[n][phase] for phase, n in enumerate(chosen)) / len(_PHASES)
    cells = ", ".join(f"{n}:{_WORKERS - n} for {name}" for n, (name, _, _) in zip(chosen, _PHASES, strict=True))
    curves = [
        Curve(name, [(float(n), 100 * shares[n][phase]) for n in splits]) for phase, (name, _, _) in enumerate(_PHASES)
    ]
    return Outcome(
        f"{100 * followed:.0f} % of the requests in time with {cells}; {100 * fixed[best_fixed]:.0f} % with the best"
        f" fixed split, {best_fixed}:{_WORKERS - best_fixed}, and {100 * min(fixed.values()):.0f} % with the worst",
        followed >= 0.9 * fixed[best_fixed],
        "each phase starts with empty workers, and the change of a worker's role takes no time, so that the gain is an"
        " upper bound",
        [Panel(f"prefill workers of {_WORKERS}", "% of requests in time", curves)],
    )


def bench_defaults() -> Outcome:
    """Compare the defaults of `kvferry bench latency` with those of the article."""
    defaults = {option.name: option.default for option in latency.params}
    ours = (defaults["input_tokens"], defaults["output_tokens"])
    return Outcome(
        f"modes latency, throughput, serve, transfer, kernels; latency has {ours[0]} in, {ours[1]} out, batch 1 and 8",
        ours == (32, 128),
        "prompts are longer and outputs shorter, so that a run on two cores takes a minute; each number is a flag",
    )
