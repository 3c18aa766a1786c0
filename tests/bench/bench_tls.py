"""Hand-off time and inter-token time with and without encryption between the processes of a stack, in turn.

    make bench-tls                          two stacks, 120 rounds; a row appended to tests/bench/results/tls.csv
    make bench-tls ARGS="--rounds 5"
    make bench-tls ARGS="--of kv-encryption --connector tcp --length 1000"    to kv_encryption.csv: KV on the network

Both stacks run at once, of a prefill and a decode worker each; a round sends the same prompt to one, then to the other,
and the next round begins with the other one. The other stack is idle meanwhile. The row has medians over the rounds,
and the interval of the median of the rounds' ratios: 95 % of 2,000 bootstrap samples. Processor time is the sum over
gateway and workers. Before each round, both stacks answer a few calls of the smallest size (`call`), in turn.
"""

import argparse
import asyncio
import os
import random
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.machine import cpu_name

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.client import AsyncClient
from kvferry.core.clock import SystemClock
from kvferry.core.sampling import SamplingParams
from kvferry.rpc.channel import open_channel
from kvferry.rpc.tls.certificate_files import CertificateFiles
from kvferry.rpc.tls.pool_tls import PoolTls
from kvferry.stack.local_stack import LocalStack
from kvferry.stack.plan.processes import StackConfig

RESULTS = Path(__file__).parent / "results"
POOL_TLS, KV_ENCRYPTION = "pool-tls", "kv-encryption"
CALL_SECONDS = 300.0
CLOCK = SystemClock()
MEASURES = ("call_ms", "handoff_ms", "first_token_ms", "inter_token_ms", "processor_ms")
CALLS = 20
"""Number of calls of the smallest size before each request."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Durations of one request, in milliseconds."""

    handoff_ms: float
    first_token_ms: float
    inter_token_ms: float
    """Median over the request's tokens."""
    tokens: tuple[int, ...]
    processor_ms: float
    call_ms: float
    """Median duration of the calls of the smallest size before the request."""


class Measured:
    """A running stack, its client, and a channel to one of its workers."""

    def __init__(self, stack: LocalStack, client: AsyncClient, channel: grpc.aio.Channel) -> None:
        self.client = client
        pids = [process.pid for process in (stack.gateway, *stack.workers) if process is not None]
        self._processes = [psutil.Process(pid) for pid in pids if pid is not None]
        self._health = health_pb2_grpc.HealthStub(channel)

    def processor_ms(self) -> float:
        """Return the processor time of gateway and workers until now, in milliseconds."""
        return sum(sum(process.cpu_times()[:2]) for process in self._processes) * 1e3

    async def call_ms(self) -> float:
        """Return the median duration of a few calls of the smallest size, in milliseconds."""
        times = []
        for _ in range(CALLS):
            began = CLOCK.monotonic()
            await self._health.Check(health_pb2.HealthCheckRequest())
            times.append((CLOCK.monotonic() - began) * 1e3)
        return statistics.median(times)


def gateway_tls(stack: LocalStack) -> PoolTls | None:
    """Return the TLS of a stack's gateway."""
    assert stack.gateway is not None
    arguments = list(stack.gateway.spec.arguments)
    if "--pool-tls-ca-file" not in arguments:
        return None
    paths = [arguments[arguments.index(f"--pool-tls-{name}-file") + 1] for name in ("cert", "key", "ca")]
    return PoolTls(CertificateFiles(*map(Path, paths)), is_worker=False)


async def measure(measured: Measured, prompt: list[int], tokens: int) -> Sample:
    """Send one request whose KV is handed off."""
    call_ms, before, client = await measured.call_ms(), measured.processor_ms(), measured.client
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    times, found, last = [CLOCK.monotonic()], [], None
    async with aclosing(client.generate(prompt, sampling, timeout=CALL_SECONDS)) as chunks:
        async for chunk in chunks:
            times += [CLOCK.monotonic()] * len(chunk.tokens)
            found += [token.token_id for token in chunk.tokens]
            last = chunk
    assert last is not None
    assert last.timing is not None
    assert last.timing.handoff_outcome == "fetched", last.timing
    gaps = [after - before for before, after in pairwise(times[1:])]
    return Sample(
        last.timing.handoff_seconds * 1e3,
        (times[1] - times[0]) * 1e3,
        statistics.median(gaps) * 1e3,
        tuple(found),
        measured.processor_ms() - before,
        call_ms,
    )


def interval(ratios: Sequence[float], seed: int = 1) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


async def main(of: str, rounds: int, length: int, tokens: int, connector: str) -> None:
    """Measure and print."""
    samples: dict[bool, list[Sample]] = {False: [], True: []}
    async with AsyncExitStack() as ending:
        clients = {}
        for tls in (False, True):
            encryption = ("--kv-encryption", "true") if tls and of == KV_ENCRYPTION else ()
            config = StackConfig(
                model="smollm2-135m-instruct",
                connector=connector,
                http="127.0.0.1:0",
                grpc="127.0.0.1:0",
                cores=os.cpu_count() or 1,
                threads=1,
                worker_flags=("--kv-memory", "128MiB", "--load-policy", "always", *encryption),
                gateway_flags=("--kv-prefetch-tokens", "0"),
                pool_tls=tls and of == POOL_TLS,
            )
            stack = LocalStack(config, clock=CLOCK)
            ending.push_async_callback(stack.stop, 30.0)
            client = await ending.enter_async_context(AsyncClient((await stack.start()).grpc))
            channel = await ending.enter_async_context(
                open_channel(next(iter(stack.worker_admin.values())), gateway_tls(stack))
            )
            clients[tls] = Measured(stack, client, channel)
        for number in range(-2, rounds):  # the first two rounds are not recorded
            draw = random.Random(1000 + number)
            prompt = [draw.randrange(1000, 20_000) for _ in range(length)]
            for tls in (False, True) if number % 2 else (True, False):
                sample = await measure(clients[tls], prompt, tokens)
                if number >= 0:
                    samples[tls].append(sample)
    assert [s.tokens for s in samples[False]] == [s.tokens for s in samples[True]]
    row: dict[str, object] = {"cpu": cpu_name(), "commit": commit(), "connector": connector, "rounds": rounds}
    row |= {"prompt_tokens": length, "output_tokens": tokens}
    for name in MEASURES:
        plain, secured = ([getattr(s, name) for s in samples[tls]] for tls in (False, True))
        ratios = [b / a for a, b in zip(plain, secured, strict=True)]
        low, high = interval(ratios)
        ratio = statistics.median(ratios)
        row |= {f"{name}_off": round(statistics.median(plain), 3), f"{name}_on": round(statistics.median(secured), 3)}
        row |= {f"{name}_ratio": round(ratio, 4), f"{name}_low": round(low, 4), f"{name}_high": round(high, 4)}
        print(
            f"{name:<16} off {statistics.median(plain):8.3f}  on {statistics.median(secured):8.3f}  "
            f"ratio {ratio:.3f} ({low:.3f} to {high:.3f})"
        )
    append_csv(RESULTS / ("tls.csv" if of == POOL_TLS else "kv_encryption.csv"), [row])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--of", default=POOL_TLS, choices=(POOL_TLS, KV_ENCRYPTION))
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--connector", default="shm")
    given = parser.parse_args()
    asyncio.run(main(given.of, given.rounds, given.length, given.tokens, given.connector))
