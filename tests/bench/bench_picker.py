"""The endpoint picker: picks per second and their times over gRPC from another process, with 10 to 1,000 endpoints,
and the time that it adds to a request through a real Envoy.

    make bench-picker                      rows appended to tests/bench/results/picker.csv
    make bench-picker ARGS="--dry"         no rows

one        picks one after another, which is the time of a pick without a queue
load       as many as 16 streams at a time, which is the rate
envoy      requests one after another through Envoy with the picker, less those through Envoy without it

A pick is one stream: headers, a body of about 2 KB of one of 200 conversations, the decision, the body sent back, the
headers of the response. The endpoints are addresses of one HTTP server in the process of the benchmark, which answers
scrapes with a page of vLLM's size. Client, server and picker share the processors.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil
from aiohttp import web
from harness.machine import cpu_name
from harness.servers.envoy import EnvoyMode, envoy, envoy_path
from harness.servers.model_server import ModelServer, model_servers
from harness.servers.picker_client import body_message, head_message, picker_stub, response_message
from harness.servers.processes import running

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv

RESULTS = Path(__file__).parent / "results" / "picker.csv"
_CONVERSATIONS = 200
_CLIENT = "--client"
_PAGE = "".join(
    f'vllm:request_time_seconds_bucket{{le="{number}",model_name="meta-llama/Llama-3.1-8B-Instruct"}} {number}.0\n'
    for number in range(250)
)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure."""

    date: str
    commit: str
    cpu: str
    figure: str
    endpoints: int
    picks_per_second: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    cpu_ms: float


@dataclass(frozen=True, slots=True)
class PickTimes:
    """Times of picks in milliseconds."""

    picks_per_second: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    cpu_ms: float = 0.0
    """Processor time of the picker for each pick, with the scrapes meanwhile; 0 if it is not measured."""


def times_of(seconds: list[float], elapsed: float) -> PickTimes:
    """Return the quantiles of times."""
    ordered = sorted(seconds)

    def quantile(share: float) -> float:
        return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)

    return PickTimes(round(len(ordered) / elapsed, 1), quantile(0.5), quantile(0.95), quantile(0.99))


def body(number: int) -> bytes:
    """Return the body of a turn of one of the conversations."""
    text = f"You are assistant number {number % _CONVERSATIONS}. " * 60
    turn = {"role": "user", "content": f"question {number}"}
    messages = [{"role": "system", "content": text}, turn]
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 64, "stream": True}).encode()


async def pick_many(address: str, count: int, streams: int) -> PickTimes:
    """Pick `count` times, `streams` at a time."""
    times: list[float] = []
    head = head_message({f"x-header-{number}": "value" * 4 for number in range(12)})
    bodies = [body_message(body(number)) for number in range(_CONVERSATIONS)]
    response = response_message()
    async with picker_stub(address) as stub:

        async def picks(first: int) -> None:
            for number in range(first, count, streams):
                began = time.perf_counter()
                call = stub.open()
                await call.write(head)
                await call.write(bodies[number % _CONVERSATIONS])
                await call.read()
                times.append(time.perf_counter() - began)
                await call.read()
                await call.write(response)
                await call.read()
                await call.done_writing()
                await call.read()

        began = time.perf_counter()
        await asyncio.gather(*(picks(first) for first in range(streams)))
        return times_of(times, time.perf_counter() - began)


def in_another_process(address: str, count: int, streams: int) -> PickTimes:
    """Run `pick_many` in another process."""
    command = [sys.executable, __file__, _CLIENT, address, str(count), str(streams)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    return PickTimes(**json.loads(found))


@asynccontextmanager
async def pages() -> AsyncIterator[int]:
    """Answer scrapes at all addresses of the loopback network; yield the port."""
    number = 0

    async def metrics(request: web.Request) -> web.Response:
        nonlocal number
        number += 1
        load = f"vllm:num_requests_running {number % 7}\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.3\n"
        return web.Response(text=f"{_PAGE}{load}vllm:prompt_tokens_total {number}\n")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "0.0.0.0", 0)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def over_grpc(num_endpoints: int, count: int) -> dict[str, PickTimes]:
    """Return the times of picks of a picker process with a number of endpoints."""
    async with pages() as port:
        addresses = [f"127.1.{number // 250}.{number % 250 + 1}:{port}" for number in range(num_endpoints)]
        flags = [flag for address in addresses for flag in ("--endpoints", address)]
        with running("picker", "--listen", "127.0.0.1:0", "--plaintext", *flags) as picker:
            found = await asyncio.to_thread(picker.wait_for, "listening")
            address = str(found["grpc"])
            await asyncio.to_thread(in_another_process, address, 500, 4)
            process = psutil.Process(picker.process.pid)

            async def measured(count: int, streams: int) -> PickTimes:
                before = sum(process.cpu_times()[:2])
                times = await asyncio.to_thread(in_another_process, address, count, streams)
                return replace(times, cpu_ms=round(1000 * (sum(process.cpu_times()[:2]) - before) / count, 3))

            return {"one": await measured(count // 4, 1), "load": await measured(count, 16)}


async def through_envoy(count: int) -> dict[str, PickTimes]:
    """Return the times of requests through Envoy with the picker, and without it."""
    found: dict[str, PickTimes] = {}
    server = ModelServer()
    async with model_servers(server):
        with running("picker", "--listen", "127.0.0.1:0", "--plaintext", "--endpoints", server.address) as picker:
            address = str((await asyncio.to_thread(picker.wait_for, "listening"))["grpc"])
            for figure, mode in (
                ("envoy with the picker", EnvoyMode(by_override=True, endpoints=(server.address,))),
                ("envoy alone", EnvoyMode(by_override=True, endpoints=(server.address,), is_off=True)),
            ):
                with tempfile.TemporaryDirectory() as folder:
                    async with envoy(address, Path(folder), mode) as url, httpx.AsyncClient(base_url=url) as http:
                        found[figure] = await _requests(http, count)
    return found


async def _requests(http: httpx.AsyncClient, count: int) -> PickTimes:
    times: list[float] = []
    first = time.perf_counter()
    for number in range(count):
        began = time.perf_counter()
        (await http.post("/v1/chat/completions", content=body(number).replace(b"true", b"false"))).raise_for_status()
        times.append(time.perf_counter() - began)
    return times_of(times, time.perf_counter() - first)


async def measure(endpoints: list[int], count: int) -> list[Row]:
    """Return all rows."""
    stamp = datetime.now(UTC).replace(microsecond=0).isoformat()
    rows: list[Row] = []
    for number in endpoints:
        for figure, times in (await over_grpc(number, count)).items():
            rows.append(Row(stamp, commit(), cpu_name(), figure, number, **asdict(times)))
            print(rows[-1])
    if envoy_path() is not None:
        for figure, times in (await through_envoy(count // 10)).items():
            rows.append(Row(stamp, commit(), cpu_name(), figure, 1, **asdict(times)))
            print(rows[-1])
    return rows


def main() -> None:
    """Measure, and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="append no rows")
    parser.add_argument("--endpoints", default="10,100,1000")
    parser.add_argument("--count", type=int, default=6000)
    arguments = parser.parse_args()
    rows = asyncio.run(measure([int(number) for number in arguments.endpoints.split(",")], arguments.count))
    if not arguments.dry:
        append_csv(RESULTS, [asdict(row) for row in rows])


if __name__ == "__main__":
    if sys.argv[1:2] == [_CLIENT]:
        print(json.dumps(asdict(asyncio.run(pick_many(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))))
    else:
        main()
