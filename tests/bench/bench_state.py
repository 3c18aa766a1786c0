"""What shared quotas cost a request, in alternating pairs with and without `--state`, and what three gateways admit.

    make bench-state                          eight pairs
    make bench-state ARGS="--pairs 4"
    make bench-state ARGS="--files"           the storage of files and batches only

Gateways, a stub worker that generates nothing and a Redis server run all the time. All gateways have a quota of
requests. Rows are appended to tests/bench/results/state.csv.

latency   requests with one token at a constant rate, from the planned send to the last byte; no quota is used up
stored    the same with responses that are stored: in the gateway's memory, or in Redis; a quarter of the rate
continued the same with responses that continue one with 16 turns, and are not stored
admitted  requests that three gateways admit together, at twice the tenant's limit, as a share of the limit; "off": the
          same gateways, each with its own quota
files     one thread uploads 64 MiB, reads them, and writes result lines of 1 kB: in a folder ("off"), in Redis ("on")
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from bench_gateway import MODEL, TEXT, answer, body_of, open_loop, prompts, stub, wait_ready
from harness.machine import cpu_name
from harness.servers.processes import running
from harness.servers.redis_server import redis_server
from harness.servers.worker_channel import TEST_KEYS

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.core.clock import SystemClock
from kvferry.gateway.batches import lines
from kvferry.gateway.batches.folder import BatchFolder
from kvferry.gateway.batches.records import FileRecord, new_batch_id, new_file_id, result_ids
from kvferry.gateway.batches.shared.shared_calls import SharedCalls
from kvferry.gateway.batches.shared.shared_storage import SharedStorage
from kvferry.gateway.batches.storage import BatchStorage
from kvferry.gateway.state.blocking_client import BlockingStateClient
from kvferry.gateway.state.pool_seal import PoolSeal
from kvferry.gateway.state.state_url import parse_state_url
from kvferry.model.source import open_model

RESULTS = Path(__file__).parent / "results" / "state.csv"
CONNECTIONS = 32
LIMIT_PER_SECOND, BURST = 20, 20
FILE_MIB, FILE_LINES = 64, 500
FILE_CELLS = {"upload": "MB/s", "read": "MB/s", "result line": "ms"}
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def response_of(prompt: str, **more: object) -> bytes:
    """Return an HTTP request of a response with one token."""
    body = json.dumps({"input": prompt, "max_output_tokens": 1, "ignore_eos": True, **more}).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


async def conversation(http: str, asked: Sequence[str]) -> str:
    """Store a conversation of 16 turns; return the id of its last response."""
    host, _, port = http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    name = None
    for prompt in asked[:16]:
        writer.write(response_of(prompt, previous_response_id=name))
        name = json.loads(await answer(reader))["id"]
    writer.close()
    return str(name)


async def latency(http: str, rate: float, seconds: float, requests: Sequence[bytes]) -> float:
    """Return the median time of a request with one token, in milliseconds."""
    host, _, port = http.rpartition(":")
    idle: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        idle.put_nowait(await asyncio.open_connection(host, int(port)))

    async def call(number: int) -> None:
        reader, writer = await idle.get()
        writer.write(requests[number % len(requests)])
        await answer(reader)
        idle.put_nowait((reader, writer))

    await open_loop(call, rate, 0.5)
    taken = await open_loop(call, rate, seconds)
    while not idle.empty():
        idle.get_nowait()[1].close()
    return 1e3 * statistics.median(taken)


async def admitted(https: Sequence[str], rate: float, seconds: float) -> int:
    """Return how many requests the gateways admit, which get them in turns."""
    request, found = body_of("hi", 1, stream=False), 0

    async def call(number: int) -> None:
        nonlocal found
        host, _, port = https[number % len(https)].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        found += head.startswith(b"HTTP/1.1 200")
        writer.close()

    await open_loop(call, rate, seconds)
    return found


def measure(pairs: int, rate: float, seconds: float, *, is_short: bool) -> list[dict[str, object]]:
    """Measure gateways with and without shared state in turns."""
    token = open_model(MODEL).tokenizer.encode(TEXT, add_special=False)[0]
    asked, rows = prompts(64), list[dict[str, object]]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, per_minute, burst in (("many", 10**9, 10**9), ("few", 60 * LIMIT_PER_SECOND, BURST)):
            (folder / name).write_text(f"[default]\nrequests_per_minute = {per_minute}\nrequest_burst = {burst}\n")
        redis = stack.enter_context(redis_server())
        worker = stack.enter_context(stub(token, 1))
        flags = (
            "--both", f"{worker}/{worker.rpartition(':')[2]}", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0",
            "--model", MODEL, "--batch-folder", "off",
        )  # fmt: skip

        def gateways(tenants: str, database: int | None, number: int) -> list[str]:
            """Start gateways, and return their addresses."""
            state = () if database is None else ("--state", f"redis://127.0.0.1:{redis.port}/{database}")
            more = ("--tenants", str(folder / tenants), *state)
            started = [stack.enter_context(running("gateway", *flags, *more, env=TEST_KEYS)) for _ in range(number)]
            https = [str(each.wait_for("listening")["http"]) for each in started]
            for http in https:
                wait_ready(http)
            return https

        single = {"off": gateways("many", None, 1), "on": gateways("many", 0, 1)}
        three = {"off": gateways("few", None, 3), "on": gateways("few", 1, 3)}
        for pair in range(pairs):
            cells = {"latency p50": "ms", "stored p50": "ms", "continued p50": "ms"}
            cells |= {} if is_short else {"admitted": "of the limit"}
            values: dict[str, dict[str, float]] = {cell: {} for cell in cells}
            for name in ("off", "on") if pair % 2 == 0 else ("on", "off"):
                http = single[name][0]
                last = asyncio.run(conversation(http, [prompt[:200] for prompt in asked]))
                for cell, requests in (
                    ("latency p50", [body_of(prompt, 1, stream=False) for prompt in asked]),
                    ("stored p50", [response_of(prompt) for prompt in asked]),
                    ("continued p50", [response_of("hi", previous_response_id=last, store=False)]),
                ):
                    part = rate if cell == "latency p50" else rate / 4
                    values[cell][name] = round(asyncio.run(latency(http, part, seconds, requests)), 3)
                if is_short:
                    continue
                # A bucket that refusals have emptied, so that all that is admitted is what it gains.
                asyncio.run(admitted(three[name], 6 * LIMIT_PER_SECOND, 4.0))
                count = asyncio.run(admitted(three[name], 2 * LIMIT_PER_SECOND, 2 * seconds))
                values["admitted"][name] = round(count / (LIMIT_PER_SECOND * 2 * seconds), 3)
            for cell, unit in cells.items():
                rows.append({"pair": pair, "cell": cell, **values[cell], "unit": unit})
                print(f"pair {pair}  {cell:12} off {values[cell]['off']:8.3f}  on {values[cell]['on']:8.3f} {unit}")
    return rows


def measure_files(pairs: int) -> list[dict[str, object]]:
    """Measure the storage of files and batches in a folder and in Redis, in turns."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder, redis_server() as redis:
        client = BlockingStateClient(parse_state_url(f"redis://127.0.0.1:{redis.port}/0"), SystemClock(), "files")
        calls = SharedCalls(client, PoolSeal(b"k" * 32), "bench", 8 << 30, SystemClock())
        storages: dict[str, BatchStorage] = {
            "off": BatchFolder(Path(folder)), "on": SharedStorage(calls, client.close),
        }  # fmt: skip
        try:
            for pair in range(pairs):
                order = ("off", "on") if pair % 2 == 0 else ("on", "off")
                found = {name: file_times(storages[name]) for name in order}
                for cell, unit in FILE_CELLS.items():
                    values = {name: round(found[name][cell], 4) for name in ("off", "on")}
                    rows.append({"pair": pair, "cell": cell, **values, "unit": unit})
                    print(f"pair {pair}  {cell:12} off {values['off']:8.3f}  on {values['on']:8.3f} {unit}")
        finally:
            for storage in storages.values():
                storage.close()
    return rows


def file_times(storage: BatchStorage) -> dict[str, float]:
    """Return the rates of an upload and of its reading in MB/s, and the time of writing a line in milliseconds."""
    piece, now = os.urandom(1 << 20), int(time.time())
    begun = time.perf_counter()
    upload = storage.new_upload(new_file_id())
    for _ in range(FILE_MIB):
        upload.write(piece)
    record = FileRecord(upload.file_id, "bench", "batch", "bench", upload.num_bytes, now, now + 3600)
    storage.add(upload, record, max_files=1000, max_bytes=1 << 40)
    uploaded = time.perf_counter()
    with storage.open_content(record.id) as file:
        while file.read(1 << 20):
            pass
    read = time.perf_counter()
    storage.delete("bench", record.id, now)
    results = storage.open_results(result_ids(new_batch_id())[0], storage.try_lock())
    written = time.perf_counter()
    for number in range(FILE_LINES):
        answer = lines.LineResponse(200, "id", msgspec.Raw(b'"%s"' % (b"x" * 900)))
        results.append(lines.result_line(str(number), answer))
    ended = time.perf_counter()
    results.close()
    megabytes = FILE_MIB * (1 << 20) / 1e6
    return {
        "upload": megabytes / (uploaded - begun),
        "read": megabytes / (read - uploaded),
        "result line": 1e3 * (ended - written) / FILE_LINES,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--short", action="store_true", help="latencies only")
    parser.add_argument("--files", action="store_true", help="the storage of files and batches only")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    common = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), "cpu": cpu_name(),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip
    if arguments.files:
        rows = measure_files(arguments.pairs)
    else:
        rows = measure(arguments.pairs, arguments.rate, arguments.seconds, is_short=arguments.short)
    append_csv(arguments.csv, [{**common, **row} for row in rows])


if __name__ == "__main__":
    main()
