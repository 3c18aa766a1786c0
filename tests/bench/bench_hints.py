"""Agents that wait for tools while other prompts fill the cache: with and without hints, with and without a tier.

    make bench-hints                        rows appended to tests/bench/results/hints.csv

In each turn, the agents send their conversations one after the other and then wait. In the gap, other clients compute
as many tokens as the cache holds. The stacks take turns: least recently used alone, and the same with retention.

    finish      seconds of all turns of the agents, without the gaps
    hits        tokens of the turns that were not computed, of those that an earlier turn had computed
    others      seconds of the other clients' prompts, the price of the memory that is kept
"""

import argparse
import os
import statistics
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from harness.machine import cpu_name
from harness.servers.processes import running
from harness.servers.redis_server import redis_server

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.client import CacheHints, Client, SamplingParams
from kvferry.core.clock import SystemClock
from kvferry.core.retention import NO_HINTS

RESULTS = Path(__file__).parent / "results" / "hints.csv"
CLOCK = SystemClock()
SECONDS = 300.0
AGENTS, TURNS = 2, 3
FIRST_TOKENS, TURN_TOKENS = 480, 160
OTHER_TOKENS = 320
TOKEN_BYTES = 23_040
"""KV bytes per token of SmolLM2-135M in bfloat16."""
CACHE_TOKENS = 6_400
ONE = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
RETAIN = CacheHints(retain_seconds=20.0)
"""Longer than a round, and over before the same stack has its next one."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measure of one stack, a row of the CSV file."""

    date: str
    commit: str
    cpu: str
    tier: str
    hints: bool
    measure: str
    median: float
    min: float
    max: float
    n: int
    load_average: float


@dataclass(frozen=True, slots=True)
class Trial:
    """The measures of one round."""

    finish: float
    hits: float
    others: float


def _tokens(seed: int, length: int) -> list[int]:
    return [(seed * 7919 + i * i * 31 + 17 * i) % 40_000 + 500 for i in range(length)]


def trial(client: Client, round_: int, hints: CacheHints) -> Trial:
    """Run the agents' turns and the gaps between them."""
    finish = others = 0.0
    hits = possible = 0
    for turn in range(TURNS):
        for agent in range(AGENTS):
            length = FIRST_TOKENS + turn * TURN_TOKENS
            begun = CLOCK.monotonic()
            (whole,) = client.complete(_tokens(round_ * 100 + agent, length), ONE, hints=hints)
            finish += CLOCK.monotonic() - begun
            if turn:
                hits += whole.usage.cached_tokens
                possible += length - TURN_TOKENS
        begun = CLOCK.monotonic()
        for number in range(CACHE_TOKENS // OTHER_TOKENS if turn < TURNS - 1 else 0):
            client.complete(_tokens(10_000 + round_ * 1000 + turn * 100 + number, OTHER_TOKENS), ONE)
        others += CLOCK.monotonic() - begun
    return Trial(finish, hits / possible, others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[tuple[str, bool], list[Trial]] = {}
    with ExitStack() as stack:
        server = stack.enter_context(redis_server(maxmemory=str(2 << 30)))
        clients: dict[tuple[str, bool], Client] = {}
        for tier, flags in (("none", ()), ("redis", ("--tier", server.unix))):
            for is_hinted in (False, True):
                process = stack.enter_context(
                    running(
                        "up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json", "--log-level", "error",
                        "--prefill", "0", "--decode", "0", "--both", "1", "--max-model-len", "2048",
                        "--kv-memory", str(CACHE_TOKENS * TOKEN_BYTES), "--retention-share", "0.5", "--pin-share", "0",
                        *flags,
                    )
                )  # fmt: skip
                address = str(process.wait_for("ready", 180.0)["grpc"])
                clients[tier, is_hinted] = stack.enter_context(Client(address, timeout=SECONDS))
        for round_ in range(arguments.rounds + 1):
            for cell, client in clients.items():
                seen = trial(client, round_ + 10 * cell[1], RETAIN if cell[1] else NO_HINTS)
                if round_:  # the first round warms up
                    found.setdefault(cell, []).append(seen)
    rows = [
        Row(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=commit(),
            cpu=cpu_name(),
            tier=tier,
            hints=is_hinted,
            measure=measure,
            median=round(statistics.median(values), 3),
            min=round(min(values), 3),
            max=round(max(values), 3),
            n=len(values),
            load_average=round(os.getloadavg()[0], 2),
        )
        for (tier, is_hinted), trials in found.items()
        for measure, values in (
            ("finish", [one.finish for one in trials]),
            ("hits", [one.hits for one in trials]),
            ("others", [one.others for one in trials]),
        )
    ]
    append_csv(RESULTS, [asdict(row) for row in rows])
    for row in rows:
        name = f"{row.tier} {'hints' if row.hints else 'LRU'}"
        print(f"{name:<12} {row.measure:<8} {row.median:>8.3f} ({row.min} to {row.max}, {row.n})")


if __name__ == "__main__":
    main()
