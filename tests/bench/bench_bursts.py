"""Inter-token latency of running streams during bursts of long prompts, disaggregated and on one worker.

    make bench-bursts                       three stacks, 5 rounds; rows appended to tests/bench/results/bursts.csv
    make bench-bursts ARGS="--rounds 1"

split       a prefill and a decode worker, one thread each
chunked     one worker of two threads, prompts in chunks (the default size)
whole       the same, a prompt in one step

Each system gets four streams. Once all of them run, it gets four prompts of 1,024 tokens at once, three times, one
second apart. Counted are the times between tokens of the four streams, from the first burst to the last answer to one.
All systems stay up and take turns.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from harness.machine import cpu_name

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.client import AsyncClient
from kvferry.core.clock import SystemClock
from kvferry.core.sampling import SamplingParams
from kvferry.stack.local_stack import LocalStack
from kvferry.stack.plan.processes import StackConfig

RESULTS = Path(__file__).parent / "results" / "bursts.csv"
WHOLE = ("--max-chunk-tokens", "8192", "--token-budget", "8192", "--max-mixed-tokens", "8192")
SYSTEMS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "split": ({"prefill": 1, "decode": 1, "both": 0}, ("--threads", "1")),
    "chunked": ({"prefill": 0, "decode": 0, "both": 1}, ("--threads", "2")),
    "whole": ({"prefill": 0, "decode": 0, "both": 1}, ("--threads", "2", *WHOLE)),
}
STREAMS, BURSTS, PROMPTS, LENGTH = 4, 3, 4, 1024
STREAM_TOKENS = 4000
BEFORE = 32
"""Tokens of each stream before the first burst."""
CALL_SECONDS = 300.0
CLOCK = SystemClock()


@dataclass(slots=True)
class Round:
    """Results of one system in one round."""

    gaps: list[float] = field(default_factory=list)
    """Seconds between tokens of the streams, while bursts were being computed."""
    alone: list[float] = field(default_factory=list)
    """Seconds between tokens of the streams before the first burst."""
    first: list[float] = field(default_factory=list)
    """Seconds to the first token of each prompt of the bursts."""


async def arrivals(
    client: AsyncClient, prompt: list[int], tokens: int, times: list[float], enough: asyncio.Event | None = None
) -> None:
    """Append the arrival times of tokens to `times`; report when enough have arrived to begin."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    async with aclosing(client.generate(prompt, sampling, timeout=CALL_SECONDS)) as chunks:
        async for chunk in chunks:
            times += [CLOCK.monotonic()] * len(chunk.tokens)
            if enough is not None and len(times) >= BEFORE:
                enough.set()


def a_prompt(length: int, seed: int) -> list[int]:
    """Return a prompt of tokens that depends on the seed."""
    draw = random.Random(seed)
    return [draw.randrange(1000, 20_000) for _ in range(length)]


async def one_round(client: AsyncClient, seed: int) -> Round:
    """Start streams, send bursts of prompts while they run, then cancel the streams."""
    times: list[list[float]] = [[] for _ in range(STREAMS)]
    run = [asyncio.Event() for _ in times]
    streams = [
        asyncio.create_task(arrivals(client, a_prompt(32, seed * 100 + i), STREAM_TOKENS, mine, event))
        for i, (mine, event) in enumerate(zip(times, run, strict=True))
    ]
    found = Round()
    try:
        async with asyncio.timeout(CALL_SECONDS):
            await asyncio.gather(*(event.wait() for event in run))
        begun = CLOCK.monotonic()
        async with asyncio.TaskGroup() as bursts:
            for burst in range(BURSTS):
                for i in range(PROMPTS):
                    prompt = a_prompt(LENGTH, seed * 100 + 50 + burst * PROMPTS + i)
                    bursts.create_task(first_token(client, prompt, found.first))
                await asyncio.sleep(1.0)
        ended = CLOCK.monotonic()
        for mine in times:
            found.gaps += [b - a for a, b in pairwise(mine) if b > begun and a < ended]
            found.alone += [b - a for a, b in pairwise(mine) if b <= begun][8:]
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return found


async def first_token(client: AsyncClient, prompt: list[int], seconds: list[float]) -> None:
    begun, times = CLOCK.monotonic(), list[float]()
    await arrivals(client, prompt, 2, times)
    seconds.append(times[0] - begun)


@asynccontextmanager
async def a_system(name: str, model: str) -> AsyncIterator[AsyncClient]:
    counts, flags = SYSTEMS[name]
    config = StackConfig(model, connector="shm", http="127.0.0.1:0", grpc="127.0.0.1:0", worker_flags=flags, **counts)
    stack = LocalStack(config, clock=CLOCK)
    try:
        addresses = await stack.start()
        async with AsyncClient(addresses.grpc) as client:
            yield client
    finally:
        await stack.stop(10.0)


async def measure(model: str, rounds: int) -> dict[str, list[Round]]:
    """Measure all systems in turn, starting with a different one in each round; the first round is discarded."""
    found: dict[str, list[Round]] = {name: [] for name in SYSTEMS}
    async with AsyncExitStack() as stacks:
        clients = {name: await stacks.enter_async_context(a_system(name, model)) for name in SYSTEMS}
        names = list(clients)
        for number in range(rounds + 1):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                result = await one_round(clients[name], number * 10 + names.index(name) + os.getpid() % 1000)
                if number:
                    found[name].append(result)
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of seconds in milliseconds."""
    ordered = sorted(values)
    return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> int:
    """Print a table; append rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds; %(default)s")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--csv", type=Path, default=RESULTS, metavar="FILE", help="CSV file to which rows are appended")
    given = parser.parse_args()
    found = asyncio.run(measure(given.model, given.rounds))
    cells = {
        "between tokens, alone, p50": lambda r: quantile(r.alone, 0.5),
        "between tokens, p50": lambda r: quantile(r.gaps, 0.5),
        "between tokens, p99": lambda r: quantile(r.gaps, 0.99),
        "between tokens, most": lambda r: quantile(r.gaps, 1.0),
        "first token of a burst's prompts, p50": lambda r: quantile(r.first, 0.5),
    }
    print(f"{'milliseconds':<40}" + "".join(f"{name:>26}" for name in found))
    rows: list[dict[str, object]] = []
    for cell, of in cells.items():
        line = f"{cell:<40}"
        for name, rounds in found.items():
            values = [of(r) for r in rounds]
            spread = {"median_ms": statistics.median(values), "min_ms": min(values), "max_ms": max(values)}
            rounded = {column: round(value, 2) for column, value in spread.items()}
            rows.append(
                {"commit": commit(), "cpu": cpu_name(), "cell": cell, "system": name, **rounded, "n": len(values)}
            )
            line += f"{'{median_ms:.1f} ({min_ms:.1f} to {max_ms:.1f})'.format(**spread):>26}"
        print(line)
    append_csv(given.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
