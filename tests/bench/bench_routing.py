"""Routing policies in the simulator: the same workload on the same fleet, once with each policy.

    make bench-routing                                   rows appended to tests/bench/results/routing.csv
    make bench-routing ARGS="--workers 32 --only bursty --dry"
    make bench-routing ARGS="--oracle --requests 400"    also the regret against an oracle that knows all later arrivals

multi-turn      conversations of six turns: prompts begin with the turns before
shared-prefix   64 prefixes of 3,000 tokens, so that no worker can have all of them cached
hot             two prefixes of 6,000 tokens, so that one worker cannot serve all requests of one
unique          prompts with ShareGPT's lengths and nothing in common
bursty          32 requests at the same time, with 32 prefixes of 2,000 tokens

The device is an accelerator with an 8-billion-parameter model in 16 bits: 8 ms per step, 60 us per token. The rate
keeps the fleet at about two thirds of its capacity. The simulator runs the production policies; times are virtual, so
rows are equal on every machine.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from harness.routing_oracle import Oracle

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.core.clock import SystemClock
from kvferry.simulator.files.spec import read_fleet
from kvferry.simulator.fleet.fleet import SimulatedPool

RESULTS = Path(__file__).parent / "results" / "routing.csv"
POLICIES = ("latency", "prefix-hash", "least-loaded", "round-robin")
BASE, ORACLE = "latency", "oracle"
FLEET = """
seed = 3
[device]
step_ms = 8
token_us = 60
kv_token_ns = 40
pair_ns = 0.05
[engine]
blocks = 3000
kv_bytes_per_token = 131072
[link]
gbps = 100
"""
WORKLOADS: Mapping[str, tuple[float, str]] = {
    "multi-turn": (
        1.75,
        (
            'lengths = "uniform"\nnum_input = 200\nnum_output = 150\nspread = 0.5\nnum_turns = 6\nturn_seconds = 8\n'
            "most_tokens = 8192"
        ),
    ),
    "shared-prefix": (3.0, "num_input = 256\nnum_output = 100\nspread = 0.5\nnum_prefix = 3000\nnum_prefixes = 64"),
    "hot": (3.5, "num_input = 256\nnum_output = 100\nspread = 0.5\nnum_prefix = 6000\nnum_prefixes = 2"),
    "unique": (3.25, 'lengths = "sharegpt"'),
    "bursty": (
        2.5,
        (
            'arrivals = "burst"\nburst_size = 32\nnum_input = 400\nnum_output = 100\nspread = 0.5\nnum_prefix = 2000\n'
            "num_prefixes = 32"
        ),
    ),
}
"""Requests per second and worker, and fields of the workload."""


@dataclass(frozen=True, slots=True)
class Row:
    """One simulation."""

    date: str
    commit: str
    fleet: str
    """`both`, or `split` into as many prefill as decode workers."""
    workers: int
    workload: str
    policy: str
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    hit_rate: float


def fleet_file(fleet: str, workers: int, workload: str, policy: str, requests: int) -> str:
    """Return the fleet file of a row."""
    rate, fields = WORKLOADS[workload]
    half = workers // 2
    roles = {"both": workers} if fleet == "both" else {"prefill": half, "decode": workers - half}
    tables = "".join(f'[[role]]\nrole = "{role}"\nreplicas = {count}\n' for role, count in roles.items())
    demand = f"[workload]\nrequests = {requests}\nrate = {rate * workers}\n{fields}\n"
    return f'{FLEET}{tables}{demand}[gateway]\npolicy = "{policy}"\n'


def measured(fleet: str, workers: int, workload: str, policy: str, requests: int) -> Row:
    """Simulate one row."""
    is_oracle = policy == ORACLE
    text = fleet_file(fleet, workers, workload, BASE if is_oracle else policy, requests)
    spec = read_fleet(text, lambda name: Path(name).read_text())
    pool = SimulatedPool(spec.pool, spec.requests(0))
    result = Oracle(pool).run() if is_oracle else pool.run()
    ttft = result.measures.ttft.in_ms()
    date = datetime.fromtimestamp(SystemClock().wall(), UTC).isoformat(timespec="seconds")
    return Row(
        date, commit(), fleet, workers, workload, policy, round(1e3 * result.measures.ttft.mean, 3), ttft["p50"],
        ttft["p90"], ttft["p99"], round(result.measures.hit_rate, 3),
    )  # fmt: skip


def main(words: Sequence[str]) -> None:
    """Simulate all rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--only", choices=tuple(WORKLOADS), action="append", help="workload; may be repeated")
    parser.add_argument("--oracle", action="store_true", help="also simulate the oracle: minutes per row")
    parser.add_argument("--fleets", choices=("both", "split"), nargs="+", default=["both", "split"])
    parser.add_argument("--dry", action="store_true", help="append no rows")
    arguments = parser.parse_args(words)
    print(
        f"{'fleet':<6} {'workload':<14} {'policy':<13} {'TTFT mean':>9} {'p50':>8} {'p90':>8} {'p99':>8} ms"
        f"  {'hits':>5}"
    )
    for fleet in arguments.fleets:
        for workload in arguments.only or WORKLOADS:
            for policy in (*POLICIES, *([ORACLE] if arguments.oracle else [])):
                row = measured(fleet, arguments.workers, workload, policy, arguments.requests)
                print(
                    f"{fleet:<6} {workload:<14} {policy:<13} {row.ttft_mean_ms:>9.1f} {row.ttft_p50_ms:>8.0f} "
                    f"{row.ttft_p90_ms:>8.0f} {row.ttft_p99_ms:>8.0f}     {row.hit_rate:>5.2f}",
                    flush=True,
                )
                if not arguments.dry:
                    append_csv(RESULTS, [asdict(row)])


if __name__ == "__main__":
    main(sys.argv[1:])
