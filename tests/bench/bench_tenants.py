"""Latencies of a tenant while another one sends a hundred times its quota.

    make bench-tenants                                  eight windows of 15 seconds
    make bench-tenants ARGS="--rounds 8 --seconds 30"

`kvferry up` has two tenants. One streams short answers, one after another. The other has a quota of 60 requests per
minute, and sends 100 requests per second over kept connections in every second window. The ratio is that of the first
tenant's 95th percentiles with and without the other. Rows are appended to tests/bench/results/tenants.csv.
"""

import argparse
import asyncio
import hashlib
import json
import os
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from harness.machine import cpu_name
from harness.servers.processes import running
from harness.siege.in_turn import measure_in_turn

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.core.clock import SystemClock
from kvferry.core.process.priority import lower_priority

RESULTS = Path(__file__).parent / "results" / "tenants.csv"
CLOCK = SystemClock()
KEYS = {"quiet": "quiet-key-" * 4, "greedy": "greedy-key-" * 4}
REQUESTS_PER_MINUTE, RATE = 60, 100.0
SENDERS = 16


def tenants_file() -> str:
    """Return the tenants file."""
    hashes = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
    return (
        f'[tenants.quiet]\nkeys = ["sha256:{hashes["quiet"]}"]\n\n'
        f'[tenants.greedy]\nkeys = ["sha256:{hashes["greedy"]}"]\nrequests_per_minute = {REQUESTS_PER_MINUTE}\n'
        "request_burst = 1\n"
    )


async def send_greedy(http: str, seconds: float) -> Counter[int]:
    """Send `RATE` requests per second for some seconds; return the statuses of the answers."""
    statuses: Counter[int] = Counter()
    begun = CLOCK.monotonic()
    headers = {"authorization": f"Bearer {KEYS['greedy']}"}
    body = {"prompt": "The ferry", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=f"http://{http}", headers=headers, timeout=60) as client:

        async def sender(number: int) -> None:
            for turn in range(number, int(RATE * seconds), SENDERS):
                await asyncio.sleep(max(0.0, begun + turn / RATE - CLOCK.monotonic()))
                statuses[(await client.post("/v1/completions", json=body)).status_code] += 1

        await asyncio.gather(*(sender(number) for number in range(SENDERS)))
    return statuses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--greedy", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.greedy:
        lower_priority(10)  # a real client has a machine of its own
        print(json.dumps(asyncio.run(send_greedy(arguments.greedy[0], float(arguments.greedy[1])))))
        return
    with TemporaryDirectory() as folder:
        file = Path(folder) / "tenants.toml"
        file.write_text(tenants_file())
        flags = ("--tenants", str(file), "--threads", "1", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json")
        with running("up", *flags) as stack:
            ready = stack.wait_for("ready")
            greedy = [sys.executable, __file__, "--greedy", str(ready["http"]), str(arguments.seconds)]
            measured = measure_in_turn(
                str(ready["grpc"]),
                greedy,
                rounds=arguments.rounds,
                seconds=arguments.seconds,
                api_key=KEYS["quiet"],
            )
    statuses = sum(map(Counter, measured.outputs), Counter[str]())
    rows = measured.rows()
    print("answers of the other tenant:", dict(statuses))
    common = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), "cpu": cpu_name(),
        "accepted": statuses["200"], "refused": statuses["429"], "load_average": os.getloadavg()[0],
    }  # fmt: skip
    append_csv(arguments.csv, [{**common, **row} for row in rows])


if __name__ == "__main__":
    main()
