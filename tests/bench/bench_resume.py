"""Time and throughput that the records of streams cost a gateway, in alternating pairs with and without `--state`.

    make bench-resume                          eight pairs
    make bench-resume ARGS="--pairs 4"

Both gateways, a stub worker that generates nothing and a Redis server run all the time, and are measured in turns, so
that each pair sees the same machine. Rows are appended to tests/bench/results/resume.csv.

latency    streamed requests at a constant rate, one output token, from the planned send to the last byte
streams    concurrent streams whose every token is checked; tokens per second
processor  time of the gateway's process per token of these streams, which other processes of the machine change less
"""

import argparse
import asyncio
import os
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil
from bench_gateway import MODEL, STREAM_TOKENS, TEXT, body_of, open_loop, prompts, streams, stub, wait_ready
from harness.machine import cpu_name
from harness.servers.processes import running
from harness.servers.redis_server import redis_server
from harness.servers.worker_channel import TEST_KEYS

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.model.source import open_model

RESULTS = Path(__file__).parent / "results" / "resume.csv"
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
CONNECTIONS = 32
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def latency(http: str, rate: float, seconds: float, asked: Sequence[str]) -> float:
    """Return the median time of a streamed request with one token, in milliseconds."""
    host, _, port = http.rpartition(":")
    requests = [body_of(prompt, 1, stream=True) for prompt in asked]
    idle: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        idle.put_nowait(await asyncio.open_connection(host, int(port)))

    async def call(number: int) -> None:
        reader, writer = await idle.get()
        writer.write(requests[number % len(requests)])
        found = await reader.readuntil(END)
        assert found.startswith(b"HTTP/1.1 200"), found
        idle.put_nowait((reader, writer))

    await open_loop(call, rate, 0.5)
    taken = await open_loop(call, rate, seconds)
    while not idle.empty():
        idle.get_nowait()[1].close()
    return 1e3 * statistics.median(taken)


def measure(pairs: int, rate: float, seconds: float, num_streams: int) -> list[dict[str, object]]:
    """Measure both gateways in turns."""
    token = open_model(MODEL).tokenizer.encode(TEXT, add_special=False)[0]
    asked = prompts(64)
    rows: list[dict[str, object]] = []
    with redis_server() as redis, stub(token, 1) as worker:
        flags = ("--both", f"{worker}/{worker.rpartition(':')[2]}", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
        limits = ("--max-streams", "8192", "--model", MODEL, "--batch-folder", "off")
        state = ("--state", f"redis://127.0.0.1:{redis.port}/0")
        with (
            running("gateway", *flags, *limits, env=TEST_KEYS) as without,
            running("gateway", *flags, *limits, *state, env=TEST_KEYS) as recording,
        ):
            gateways = {"off": without, "on": recording}
            addresses = {name: str(found.wait_for("listening")["http"]) for name, found in gateways.items()}
            for http in addresses.values():
                wait_ready(http)
                asyncio.run(streams(http, 64, 16))
            for pair in range(pairs):
                found: dict[str, tuple[float, float, float]] = {}
                order = ("off", "on") if pair % 2 == 0 else ("on", "off")
                for name in order:
                    redis.ask(b"FLUSHALL")
                    http = addresses[name]
                    taken = asyncio.run(latency(http, rate, seconds, asked))
                    used = sum(psutil.Process(gateways[name].process.pid).cpu_times()[:2])
                    streamed = asyncio.run(streams(http, num_streams, STREAM_TOKENS))
                    used = sum(psutil.Process(gateways[name].process.pid).cpu_times()[:2]) - used
                    found[name] = taken, streamed, 1e6 * used / (num_streams * STREAM_TOKENS)
                cells = (("latency p50", "ms"), (f"{num_streams} streams", "tokens/s"), ("processor", "us a token"))
                for number, (cell, unit) in enumerate(cells):
                    values = {name: round(found[name][number], 3) for name in ("off", "on")}
                    rows.append({"pair": pair, "cell": cell, **values, "unit": unit})
                    print(
                        f"pair {pair}  {cell:16} off {values['off']:10.2f}  on {values['on']:10.2f} {unit}", flush=True
                    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    common = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), "cpu": cpu_name(),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip
    rows = measure(arguments.pairs, arguments.rate, arguments.seconds, arguments.streams)
    append_csv(arguments.csv, [{**common, **row} for row in rows])


if __name__ == "__main__":
    main()
