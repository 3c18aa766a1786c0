"""Latencies of a tenant while another one sends its quota, and a hundred times its quota.

    make bench-tenants                                  eight windows of 15 seconds for each rate
    make bench-tenants ARGS="--rounds 8 --seconds 30"

`kvferry up` has two tenants. One streams short answers, one after another. The other has a quota of 60 requests per
minute, and sends 1 or 100 requests per second over kept connections in every second window. The ratio is that of the
first tenant's 95th percentiles with and without the other. Rows are appended to tests/bench/results/tenants.csv.
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
REQUESTS_PER_MINUTE = 60
RATES = (1.0, 100.0)
SENDERS = 16


def tenants_file() -> str:
    """Return the tenants file."""
    hashes = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
    return (
        f'[tenants.quiet]\nkeys = ["sha256:{hashes["quiet"]}"]\n\n'
        f'[tenants.greedy]\nkeys = ["sha256:{hashes["greedy"]}"]\nrequests_per_minute = {REQUESTS_PER_MINUTE}\n'
        "request_burst = 1\n"
    )


async def post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> int:
    """Send a request on a kept connection; return the status of the answer."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, _, length = head.partition(b"content-length:")
    await reader.readexactly(int(length.partition(b"\r\n")[0]))
    return int(head.split(b" ", 2)[1])


async def send_greedy(http: str, rate: float, seconds: float) -> Counter[int]:
    """Send `rate` requests per second for some seconds; return the statuses of the answers. The requests are bytes that
    are made once, since an HTTP client takes more processor time than the gateway, and both are on the same cores."""
    statuses: Counter[int] = Counter()
    body = json.dumps({"prompt": "The ferry", "max_tokens": 32, "temperature": 0, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {http}\r\nauthorization: Bearer {KEYS['greedy']}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    host, _, port = http.rpartition(":")
    begun = CLOCK.monotonic()

    async def sender(number: int) -> None:
        for turn in range(number, int(rate * seconds), SENDERS):
            await asyncio.sleep(max(0.0, begun + turn / rate - CLOCK.monotonic()))
            if turn == number:  # not earlier: the gateway closes connections that send nothing
                reader, writer = await asyncio.open_connection(host, int(port))
            statuses[await post(reader, writer, head.encode() + body)] += 1

    await asyncio.gather(*(sender(number) for number in range(SENDERS)))
    return statuses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--greedy", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.greedy:
        lower_priority(10)  # a real client has a machine of its own
        print(json.dumps(asyncio.run(send_greedy(arguments.greedy[0], *map(float, arguments.greedy[1:])))))
        return
    rows: list[dict[str, object]] = []
    with TemporaryDirectory() as folder:
        file = Path(folder) / "tenants.toml"
        file.write_text(tenants_file())
        flags = ("--tenants", str(file), "--threads", "1", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json")
        with running("up", *flags) as stack:
            ready = stack.wait_for("ready")
            for rate in RATES:
                measured = measure_in_turn(
                    str(ready["grpc"]),
                    [sys.executable, __file__, "--greedy", str(ready["http"]), str(rate), str(arguments.seconds)],
                    rounds=arguments.rounds,
                    seconds=arguments.seconds,
                    api_key=KEYS["quiet"],
                )
                statuses = sum(map(Counter, measured.outputs), Counter[str]())
                print(f"the other tenant sends {rate:g} requests/s: {dict(statuses)}")
                counts = {"rate": rate, "accepted": statuses["200"], "refused": statuses["429"]}
                rows += [{**counts, **row} for row in measured.rows()]
    common = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), "cpu": cpu_name(),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip
    append_csv(arguments.csv, [{**common, **row} for row in rows])


if __name__ == "__main__":
    main()
