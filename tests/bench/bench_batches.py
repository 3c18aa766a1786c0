"""Latencies of an interactive client, alone and beside a batch of any length, in turn, and what the batch computes.

    make bench-batches                                  eight windows of 20 seconds
    make bench-batches ARGS="--rounds 8 --seconds 30"

`kvferry up` with its default settings. A client streams short answers, one after another, with pauses. In every second
window, a batch of chat completions runs beside it. Rows are appended to tests/bench/results/batches.csv.
"""

import argparse
import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import quantiles

import httpx
from harness.machine import cpu_name
from harness.servers.processes import running
from harness.siege.canary import Canary
from harness.waiting import until

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.client import AsyncClient
from kvferry.core.clock import SystemClock

RESULTS = Path(__file__).parent / "results" / "batches.csv"
CLOCK = SystemClock()
LINES = 5000
LINE_TOKENS = 64
PAUSE_SECONDS = 0.1
WARM_UP_SECONDS = 5.0


@contextmanager
def a_batch(http: httpx.Client, model: str) -> Iterator[Counter[str]]:
    """Run a batch for the length of the `with` block, from its first completed lines on; count its completed lines."""
    body = {"model": model, "max_tokens": LINE_TOKENS, "temperature": 0, "ignore_eos": True}
    lines = (
        {
            "custom_id": str(number), "method": "POST", "url": "/v1/chat/completions",
            "body": {**body, "messages": [{"role": "user", "content": f"Tell me about the number {number}."}]},
        }
        for number in range(LINES)
    )  # fmt: skip
    content = "\n".join(map(json.dumps, lines)).encode()
    file = http.post("/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"}).json()
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = http.post("/batches", json=wanted).json()

    def completed() -> int:
        return int(http.get(f"/batches/{batch['id']}").json()["request_counts"]["completed"])

    until(lambda: completed() > 0, "the batch has completed a line", seconds=300)
    before, counts = completed(), Counter[str]()
    yield counts
    counts["lines"] = completed() - before
    http.post(f"/batches/{batch['id']}/cancel").raise_for_status()
    until(lambda: http.get(f"/batches/{batch['id']}").json()["status"] == "cancelled", "the batch is cancelled")


async def watch(grpc: str, seconds: float, canary: Canary) -> None:
    """Stream short answers for some seconds, one after another."""
    deadline = CLOCK.monotonic() + seconds
    async with AsyncClient(grpc) as client:
        while CLOCK.monotonic() < deadline:
            await canary.stream(client)
            await asyncio.sleep(PAUSE_SECONDS)


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile in milliseconds."""
    return 1e3 * quantiles(values, n=100, method="inclusive")[percent - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--flags", nargs="*", default=[], help="flags of `kvferry up`, without their dashes")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    addresses = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--json")
    flags = tuple(f"--{flag}" if number % 2 == 0 else flag for number, flag in enumerate(arguments.flags))
    with running("up", "--prefill", "0", "--decode", "0", "--both", "1", *addresses, *flags) as stack:
        ready = stack.wait_for("ready")
        model = httpx.get(f"http://{ready['http']}/v1/models", trust_env=False).json()["data"][0]["id"]
        grpc, alone, beside, completed = str(ready["grpc"]), Canary(), Canary(), 0
        asyncio.run(watch(grpc, WARM_UP_SECONDS, Canary()))  # the first streams are slower
        with httpx.Client(base_url=f"http://{ready['http']}/v1", timeout=60, trust_env=False) as http:
            for _ in range(arguments.rounds):
                asyncio.run(watch(grpc, arguments.seconds, alone))
                with a_batch(http, model) as counts:
                    asyncio.run(watch(grpc, arguments.seconds, beside))
                completed += counts["lines"]
    if failures := [*alone.failures, *beside.failures]:
        raise SystemExit(f"{len(failures)} streams failed: {failures[0]}")
    common = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), "cpu": cpu_name(),
        "load_average": os.getloadavg()[0], "lines_per_second": completed / arguments.rounds / arguments.seconds,
    }  # fmt: skip
    pairs = {
        "first token": (alone.first, beside.first),
        "second token": (alone.second, beside.second),
        "later tokens": (alone.gaps, beside.gaps),
    }
    rows: list[dict[str, object]] = []
    for name, (base, values) in pairs.items():
        for percent in (50, 95, 99):
            before, after = percentile(base, percent), percentile(values, percent)
            rows.append(
                {**common, "measure": f"{name} p{percent}", "alone_ms": before, "beside_ms": after, "n": len(base)}
            )
            print(f"{name:16} p{percent} {before:7.2f} ms alone, {after:7.2f} ms beside: {after / before:.2f}")
    print(f"the batch completed {completed} lines, {completed / arguments.rounds / arguments.seconds:.1f} per second")
    append_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()
