"""A prompt whose KV was evicted: loaded from each tier and recomputed; and the time that a hand-off adds.

    make bench-turns                        rows appended to tests/bench/results/turns.csv

Two stacks of the real model, one with the tier and one without, compute the same prompts in turn. There are few pages,
so each prompt evicts the one before. The time is measured at the client, from sending to the first token. The last
cells are the hand-off of a prompt between two workers: its whole duration, and the copy alone, from `kvferry bench`.
"""

import argparse
import os
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from harness.machine import cpu_name
from harness.servers.processes import running
from harness.servers.redis_server import redis_server

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.client import Client
from kvferry.core.clock import SystemClock
from kvferry.core.sampling import SamplingParams

RESULTS = Path(__file__).parent / "results" / "turns.csv"
CLOCK = SystemClock()
SECONDS = 300.0
PROMPTS = 5
PROMPTS_KEPT = 2.3
"""Number of prompts whose pages fit, so that each of five prompts in a cycle is evicted before it is sent again."""
TOKEN_BYTES = 23_040
"""KV bytes per token of SmolLM2-135M in bfloat16."""
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
SOME = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of one run, a row of the CSV file."""

    date: str
    commit: str
    cpu: str
    tier: str
    prompt_tokens: int
    cell: str
    median: float
    min: float
    max: float
    n: int
    unit: str
    load_average: float


def prompt(number: int, length: int) -> list[int]:
    return [(number * 7919 + i * i * 31 + 17 * i) % 40_000 + 500 for i in range(length)]


@contextmanager
def a_stack(*flags: str) -> Iterator[Client]:
    address = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json", "--log-level", "error")
    with running("up", *address, *flags) as process:
        ready = process.wait_for("ready", 180.0)
        with Client(str(ready["grpc"]), timeout=SECONDS) as client:
            yield client
        process.stop()


def first_token_ms(client: Client, tokens: list[int]) -> tuple[float, str]:
    """Return the milliseconds to the first token at the client, and the source of the KV."""
    begun = CLOCK.monotonic()
    (whole,) = client.complete(tokens, FIRST)
    took = 1e3 * (CLOCK.monotonic() - begun)
    sources = {r.source for r in whole.timing.kv if r.blocks_loaded}
    return took, "+".join(sorted(sources)) or "computed"


def measure_tier(name: str, url: str, length: int, rounds: int) -> list[tuple[str, str, list[float]]]:
    pages = str(int(PROMPTS_KEPT * length * TOKEN_BYTES))
    common = ("--prefill", "0", "--decode", "0", "--both", "1", "--kv-memory", pages)
    with a_stack(*common, "--tier", url) as with_tier, a_stack(*common) as without:
        for client in (with_tier, without):
            for number in range(PROMPTS):
                first_token_ms(client, prompt(number, length))
        threading.Event().wait(1.0)  # wait until the stores have ended
        loaded: list[float] = []
        computed: list[float] = []
        for round_ in range(rounds):
            for number in range(PROMPTS):
                took, source = first_token_ms(with_tier, prompt(number, length))
                if source != "computed":
                    loaded.append(took)
                took, _ = first_token_ms(without, prompt(number, length))
                computed.append(took)
            print(f"  {name} {length}: round {round_ + 1} of {rounds}", flush=True)
    return [(name, "first token, loaded", loaded), (name, "first token, computed", computed)]


def measure_handoff(length: int, rounds: int) -> list[tuple[str, str, list[float]]]:
    found: list[tuple[str, str, list[float]]] = []
    for connector in ("shm", "nixl", "tcp"):
        with a_stack("--connector", connector, "--load-policy", "always") as client:
            seconds: list[float] = []
            for number in range(rounds + 2):
                (whole,) = client.complete(prompt(100 + number, length), SOME)
                if number >= 2:
                    seconds.append(1e3 * whole.timing.handoff_seconds)
        found.append((connector, "hand-off, claim to verified", seconds))
        print(f"  {connector} {length}: {statistics.median(seconds):.2f} ms", flush=True)
    return found


def measure_kv_prefetch(length: int, rounds: int) -> list[tuple[str, str, list[float]]]:
    """Measure a hand-off after the end of the prompt, with and without blocks that are sent early."""
    common = ("--connector", "tcp", "--load-policy", "always")
    with a_stack(*common) as early, a_stack(*common, "--kv-prefetch-tokens", "0") as late:
        found: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            for name, client in (("early", early), ("late", late)):
                (whole,) = client.complete(prompt(200 + number, length), SOME)
                if number:
                    found.setdefault(f"hand-off, {name}", []).append(1e3 * whole.timing.handoff_seconds)
                    found.setdefault(f"blocks left, {name}", []).append(whole.timing.handoff_blocks)
    return [("tcp", cell, values) for cell, values in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024])
    arguments = parser.parse_args()
    cells: list[tuple[str, int, str, list[float]]] = []
    for length in arguments.lengths:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            server = stack.enter_context(redis_server(maxmemory=str(1 << 30)))
            urls = {"dram": "dram://?size=512MiB", "disk": f"disk://{folder}/kv?size=2GiB", "redis": server.unix}
            for name, url in urls.items():
                measured = measure_tier(name, url, length, arguments.rounds)
                cells += [(tier, length, cell, values) for tier, cell, values in measured]
    cells += [(name, 512, cell, values) for name, cell, values in measure_handoff(512, 5 * arguments.rounds)]
    cells += [(name, 1900, cell, values) for name, cell, values in measure_kv_prefetch(1900, 2 * arguments.rounds)]
    rows = [
        Row(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=commit(),
            cpu=cpu_name(),
            tier=tier,
            prompt_tokens=length,
            cell=cell,
            median=round(statistics.median(values), 2),
            min=round(min(values), 2),
            max=round(max(values), 2),
            n=len(values),
            unit="blocks" if cell.startswith("blocks") else "ms",
            load_average=round(os.getloadavg()[0], 2),
        )
        for tier, length, cell, values in cells
        if values
    ]
    append_csv(RESULTS, [asdict(row) for row in rows])
    for row in rows:
        spread = f"({row.min} to {row.max}, {row.n})"
        print(f"{row.tier:<6} {row.prompt_tokens:>5} {row.cell:<28} {row.median:>9.2f} {row.unit} {spread}")


if __name__ == "__main__":
    main()
