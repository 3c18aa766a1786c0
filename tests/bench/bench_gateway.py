"""Time that the gateway adds to a request, and the tokens that it streams, with a worker that generates nothing.

    make bench-gateway                                        one gateway process, then two
    make bench-gateway ARGS="--processes 1 --seconds 20"

A stub worker of role `both` runs in a process of its own and answers at once with constant tokens. Client, gateway and
stub share the machine's cores, so that throughput is a lower bound of what a gateway with cores of its own reaches.

latency    requests at a constant rate (open loop: the time is counted from the planned send), prompts of 1,000 tokens,
           one output token, over kept connections and over a new connection for each request. The time of the same
           calls to the stub itself is measured in the same way and subtracted, percentile by percentile.
streams    concurrent HTTP streams whose every token and order are checked; tokens per second, with one token or several
           per message of the worker (`--stream-interval`).

Rows are appended to tests/bench/results/gateway.csv.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from harness.fakes.scripted_worker import Offers, ScriptedWorker
from harness.machine import cpu_name
from harness.servers.processes import running
from harness.servers.worker_channel import TEST_KEYS

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.core.clock import SystemClock
from kvferry.core.sampling import FinishReason, SampledToken
from kvferry.model.source import open_model
from kvferry.rpc import wire
from kvferry.rpc.access.call_keys import CallVerifier
from kvferry.rpc.access.guard import token_of
from kvferry.rpc.channel import open_channel
from kvferry.v1 import decode_pb2, decode_pb2_grpc, worker_admin_pb2

RESULTS = Path(__file__).parent / "results" / "gateway.csv"
MODEL = "smollm2-135m-instruct"
CLOCK = SystemClock()
PROMPT_TOKENS, CONNECTIONS = 1000, 64
STREAM_TOKENS = 96
TEXT = " ferry"


class StubWorker(ScriptedWorker):
    """A worker whose streams have the same token at each position, so that generating costs nothing."""

    def __init__(self, token: int, step_tokens: int) -> None:
        super().__init__("both", "stub", Offers())
        self.model, self.max_model_tokens, self.max_sequences = MODEL, 8192, 1 << 16
        self.token, self.step_tokens = token, step_tokens
        self.verifier = CallVerifier((TEST_KEYS["KVFERRY_TICKET_KEY"].encode(),))

    async def Status(self, request: worker_admin_pb2.StatusRequest, context: Any) -> worker_admin_pb2.StatusResponse:
        """Prove that this process has the pool's key."""
        status = await super().Status(request, context)
        port = self.address.rpartition(":")[2].encode()
        status.proof = self.verifier.proof(token_of(context.invocation_metadata()), request.nonce + port)
        return status

    async def run_decode(self, request: decode_pb2.DecodeRequest, context: Any) -> Any:
        """Stream `max_tokens` tokens, as many per message as configured, without a pause."""
        left = request.sampling.max_tokens - request.num_generated
        token = wire.token_to_wire(SampledToken(self.token))
        while left > 0:
            count = min(left, self.step_tokens)
            left -= count
            finish = wire.finish_to_wire(None if left else FinishReason.LENGTH)
            yield decode_pb2.DecodeResponse(tokens=[token] * count, finish_reason=finish)


async def serve_stub(token: int, step_tokens: int) -> None:
    """Serve until the parent closes standard input."""
    worker = StubWorker(token, step_tokens)
    await worker.start()
    worker.verifier.listen_at(worker.address)
    print(worker.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await worker.stop()


@contextmanager
def stub(token: int, step_tokens: int) -> Iterator[str]:
    """Yield the address of a stub worker in a process of its own."""
    command = [sys.executable, __file__, "--stub", str(token), str(step_tokens)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(30)


def body_of(prompt: str, max_tokens: int, *, stream: bool) -> bytes:
    """Return an HTTP request."""
    fields = {"prompt": prompt, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}
    body = json.dumps(fields).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


async def answer(reader: asyncio.StreamReader) -> bytes:
    """Read one response with a content length; return its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return await reader.readexactly(length)


async def open_loop(call: Callable[[int], Awaitable[None]], rate: float, seconds: float) -> list[float]:
    """Send calls at a constant rate; return the latency of each in seconds, from its planned send to its end."""
    begun, found = CLOCK.monotonic() + 0.05, list[float]()

    async def one(number: int) -> None:
        planned = begun + number / rate
        await call(number)
        found.append(CLOCK.monotonic() - planned)

    async with asyncio.TaskGroup() as group:
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, begun + number / rate - CLOCK.monotonic()))
            group.create_task(one(number))
    return found


def prompts(count: int) -> list[str]:
    """Return different prompts of `PROMPT_TOKENS` tokens."""
    tokenizer = open_model(MODEL).tokenizer
    made = []
    for number in range(count):
        words = f"{number}" + TEXT * PROMPT_TOKENS
        made.append(tokenizer.decode(tokenizer.encode(words, add_special=False)[:PROMPT_TOKENS]))
    return made


async def direct_latency(address: str, rate: float, seconds: float) -> list[float]:
    """Measure calls of the stub itself, as a gateway makes them."""
    async with open_channel(address) as channel:
        run = decode_pb2_grpc.DecodeStub(channel)
        request = decode_pb2.DecodeRequest(token_ids=range(300, 300 + PROMPT_TOKENS))
        request.sampling.max_tokens = 1

        async def call(_: int) -> None:
            async for _ in run.Run(request, timeout=60):
                pass

        await open_loop(call, rate, 1.0)
        return await open_loop(call, rate, seconds)


async def gateway_latency(http: str, rate: float, seconds: float, *, kept: bool) -> list[float]:
    """Measure requests through the gateway."""
    host, _, port = http.rpartition(":")
    requests = [body_of(prompt, 1, stream=False) for prompt in prompts(64)]
    # Connections take turns: the gateway closes one that is idle for longer than its keep-alive timeout.
    idle: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    if kept:
        for _ in range(CONNECTIONS):
            idle.put_nowait(await asyncio.open_connection(host, int(port)))

    async def call(number: int) -> None:
        reader, writer = await idle.get() if kept else await asyncio.open_connection(host, int(port))
        writer.write(requests[number % len(requests)])
        await answer(reader)
        if kept:
            idle.put_nowait((reader, writer))
        else:
            writer.close()

    await open_loop(call, rate, 1.0)
    found = await open_loop(call, rate, seconds)
    while not idle.empty():
        idle.get_nowait()[1].close()
    return found


async def streams(http: str, count: int, tokens: int) -> float:
    """Read `count` concurrent streams; return the tokens per second from the first request to the last byte.

    Raises:
        AssertionError: a token of a stream is missing, repeated or wrong.
    """
    host, _, port = http.rpartition(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(count)]
    request = body_of("The", tokens, stream=True)
    begun = CLOCK.monotonic()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(request)
        found = bytearray()
        while not found.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            piece = await reader.read(1 << 18)
            assert piece, bytes(found[-200:])
            found += piece
        writer.close()
        return bytes(found)

    answers = await asyncio.gather(*(one(*each) for each in opened))
    seconds = CLOCK.monotonic() - begun
    for found in answers:
        parts = [json.loads(line[6:]) for line in found.split(b"\n") if line.startswith(b"data: {")]
        assert "".join(part["choices"][0]["text"] for part in parts if part["choices"]) == TEXT * tokens
    return count * tokens / seconds


def wait_ready(http: str) -> None:
    """Wait until a gateway accepts requests."""
    deadline = CLOCK.monotonic() + 60.0
    while httpx.get(f"http://{http}/ready").status_code != 200:
        assert CLOCK.monotonic() < deadline, "the gateway does not become ready"


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 95th percentile in milliseconds."""
    return 1e3 * statistics.median(values), 1e3 * statistics.quantiles(values, n=20)[-1]


def measure(processes: int, rate: float, seconds: float, num_streams: int) -> list[dict[str, object]]:
    """Measure all rows with a number of gateway processes."""
    token = open_model(MODEL).tokenizer.encode(TEXT, add_special=False)[0]
    rows: list[dict[str, object]] = []

    def note(cell: str, value: float, unit: str) -> None:
        rows.append({"processes": processes, "cell": cell, "value": round(value, 3), "unit": unit})
        print(f"{processes} processes  {cell:44} {value:10.2f} {unit}", flush=True)

    for step_tokens in (1, 8):
        with stub(token, step_tokens) as worker:
            flags = (
                "--both",
                f"{worker}/{worker.rpartition(':')[2]}",
                "--http",
                "127.0.0.1:0",
                "--grpc",
                "127.0.0.1:0",
            )
            limits = ("--max-streams", "8192", "--processes", str(processes))
            with running("gateway", "--model", MODEL, *flags, *limits, env=TEST_KEYS) as gateway:
                http = str(gateway.wait_for("listening")["http"])
                wait_ready(http)
                if step_tokens == 1:
                    direct = quantiles(asyncio.run(direct_latency(worker, rate * processes, seconds)))
                    note("latency stub p50", direct[0], "ms")
                    note("latency stub p95", direct[1], "ms")
                    for kept in (True, False):
                        found = quantiles(asyncio.run(gateway_latency(http, rate * processes, seconds, kept=kept)))
                        for name, value, base in zip(("p50", "p95"), found, direct, strict=True):
                            note(f"latency added {name} {'kept' if kept else 'new'} connections", value - base, "ms")
                asyncio.run(streams(http, 64, 16))
                for _ in range(2):
                    found_rate = asyncio.run(streams(http, num_streams, STREAM_TOKENS))
                    note(f"{num_streams} streams, {step_tokens} tokens per message", found_rate, "tokens/s")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second for each gateway process")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--stub", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if arguments.stub:
        asyncio.run(serve_stub(*arguments.stub))
        return
    common = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), "cpu": cpu_name(),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip
    for processes in arguments.processes:
        rows = measure(processes, arguments.rate, arguments.seconds, arguments.streams)
        append_csv(arguments.csv, [{**common, **row} for row in rows])


if __name__ == "__main__":
    main()
