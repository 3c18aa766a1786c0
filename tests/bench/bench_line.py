"""Latencies at a client: time to first token, hand-off, decode rate; disaggregated compared with aggregated.

    make bench                          all connectors, 5 repetitions; rows appended to tests/bench/results/line.csv
    make bench ARGS="--quick"           2 repetitions
    make bench ARGS="--connectors shm --json line.json --kv-memory 1GiB --no-warm-up"
    make bench ARGS="--device cuda --model FOLDER --connectors shm --prompts 2048 --kv-memory 4GiB"    on one GPU

Every system is a real stack of processes: a gateway with a prefill and a decode worker per connector, and a gateway
with one worker of role `both` (called `none`: no connector moves anything). All stay up for the whole run and take
turns within each repetition, so that a change in the machine's speed affects all of them. Systems get equal prompts;
the idle ones wait in poll and compute nothing. A first repetition is not recorded: it warms up code and accesses every
KV page of the small pools, since the first access of a page causes page faults.

cold    a prompt that no worker has computed      warm    its first n - 8 tokens were just computed
decode  from the second token to the last; with 8 streams, tokens that came while all 8 were decoding
bound   one stream reads every weight per token: measured read rate / bytes of weights (8 streams: eight times that)
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from math import prod
from pathlib import Path

import torch
from harness.machine import cpu_name

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.client import AsyncClient
from kvferry.core.clock import SystemClock
from kvferry.core.inference.chunks import Timing
from kvferry.core.sampling import SamplingParams
from kvferry.model.source import open_model
from kvferry.stack.local_stack import LocalStack
from kvferry.stack.plan.processes import StackConfig
from kvferry.weights.tensors import expected_shapes

RESULTS = Path(__file__).parent / "results" / "line.csv"
AGGREGATED = "none"
CONNECTORS = ("shm", "nixl", "memory")
PROMPTS = (32, 256, 1024)
FRESH_TOKENS = 8
"""Tokens at the end of a warm prompt that are not cached; fewer than a block, so that all blocks but the last are
cached.
"""
DECODE_TOKENS = 256
STREAMS = 8
ATTEMPTS = 5
READ_BYTES = 512 << 20
THREADS = 2
CALL_SECONDS = 300.0
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 2}
"""Bytes of a weight, by the data type of KV pages."""
CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of one run, a row of the CSV file."""

    date: str
    commit: str
    cpu: str
    dtype: str
    connector: str
    cell: str
    median: float
    min: float
    max: float
    n: int
    unit: str
    bound: float | None
    share_of_bound: float | None
    load_average: float
    """Load average of the last minute; above the run's own number of threads, other processes used the cores too."""


@dataclass(slots=True)
class System:
    """A stack under measurement, and its measured values by (cell, unit)."""

    connector: str
    client: AsyncClient
    dtype: str
    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    went_round: list[Timing] = field(default_factory=list)
    """Timings of answered requests whose KV was not handed off."""

    def note(self, cell: str, unit: str, value: float) -> None:
        self.values.setdefault((cell, unit), []).append(value)


@dataclass(slots=True)
class Answer:
    """Arrival times of a request's tokens at its client."""

    arrivals: list[float] = field(default_factory=list)
    """Seconds since the request was sent, for each token; tokens of one message have the same time."""
    timing: Timing = field(default_factory=Timing)
    sent: float = 0.0


async def ask(client: AsyncClient, prompt: Sequence[int], max_tokens: int) -> Answer:
    """Generate exactly `max_tokens` tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    answer = Answer(sent=CLOCK.monotonic())
    async with aclosing(client.generate(list(prompt), sampling, timeout=CALL_SECONDS)) as chunks:
        async for chunk in chunks:
            answer.arrivals += [CLOCK.monotonic() - answer.sent] * len(chunk.tokens)
            answer.timing = chunk.timing or answer.timing
    if len(answer.arrivals) != max_tokens:
        raise SystemExit(f"asked for {max_tokens} tokens, got {len(answer.arrivals)}")
    return answer


def a_prompt(length: int, seed: str) -> list[int]:
    """Return a prompt of token ids that depends on the seed; the same for every system."""
    source = random.Random(seed)
    return [source.randrange(1000, 20_000) for _ in range(length)]


async def first_tokens(system: System, length: int, repetition: int) -> None:
    """Measure the first token of a cold prompt with its hand-off, then of a warm one."""
    prompt, cold = await cold_prompt(system, length, f"{length}/{repetition}/{os.getpid()}")
    system.note(f"first token, {length} cold", "ms", 1e3 * cold.arrivals[0])
    if system.connector != AGGREGATED:
        took = cold.timing
        system.note(f"hand-off, {length}", "ms", 1e3 * took.handoff_seconds)
        system.note(f"hand-off, {length}", "GB/s", took.handoff_bytes / took.handoff_seconds / 1e9)
    fresh = a_prompt(FRESH_TOKENS, f"fresh/{length}/{repetition}/{os.getpid()}")
    warm = await ask(system.client, [*prompt[:-FRESH_TOKENS], *fresh], 2)
    system.note(f"first token, {length} warm", "ms", 1e3 * warm.arrivals[0])


async def cold_prompt(system: System, length: int, seed: str) -> tuple[list[int], Answer]:
    """Send a prompt whose KV is handed off. On a busy machine the gateway may consider a worker dead and bypass it;
    such a request is recorded ("not by hand-off"), and another prompt is sent.
    """
    for attempt in range(ATTEMPTS):
        prompt = a_prompt(length, f"{seed}/{attempt}")
        answer = await ask(system.client, prompt, 2)
        if system.connector == AGGREGATED or answer.timing.handoff_outcome == "fetched":
            return prompt, answer
        system.went_round.append(answer.timing)
    raise SystemExit(f"{system.connector}: {ATTEMPTS} requests, none by hand-off; the last: {system.went_round[-1]}")


async def decode_rates(system: System, repetition: int) -> None:
    """Measure the tokens per second of one stream, and of eight concurrent streams."""
    one = await ask(system.client, a_prompt(32, f"one/{repetition}/{os.getpid()}"), DECODE_TOKENS)
    system.note("decode, 1 stream", "tokens/s", (DECODE_TOKENS - 2) / (one.arrivals[-1] - one.arrivals[1]))
    prompts = [a_prompt(32, f"{i}/{repetition}/{os.getpid()}") for i in range(STREAMS)]
    many = await asyncio.gather(*(ask(system.client, p, DECODE_TOKENS) for p in prompts))
    begin = max(a.sent + a.arrivals[1] for a in many)
    end = min(a.sent + a.arrivals[-1] for a in many)
    if end <= begin:
        raise SystemExit(f"{system.connector}: the {STREAMS} streams never ran together; raise DECODE_TOKENS")
    within = sum(begin < a.sent + at <= end for a in many for at in a.arrivals)
    system.note(f"decode, {STREAMS} streams", "tokens/s", within / (end - begin))


def read_rate(data: torch.Tensor) -> float:
    """Return the memory read rate of two threads in bytes per second: the best of three sums over 512 MiB."""
    best = float("inf")
    for _ in range(3):
        begun = CLOCK.monotonic()
        data.sum()
        best = min(best, CLOCK.monotonic() - begun)
    return READ_BYTES / best


def weight_bytes(model: str, dtype: str) -> int:
    """Return the bytes of weights that a step reads: all, except the embedding if it is not also the output head."""
    config = open_model(model).config
    shapes = expected_shapes(config)
    count = sum(prod(shape) for shape in shapes.values())
    if not config.tie_word_embeddings:
        count -= config.vocab_size * config.hidden_size
    return count * DTYPE_BYTES[dtype]


@asynccontextmanager
async def a_system(connector: str, model: str, worker_flags: Sequence[str]) -> AsyncIterator[System]:
    """Yield a running stack with a client."""
    aggregated = connector == AGGREGATED
    counts = {"prefill": 0, "decode": 0, "both": 1} if aggregated else {}
    config = StackConfig(
        model,
        connector="shm" if aggregated else connector,
        http="127.0.0.1:0",
        grpc="127.0.0.1:0",
        worker_flags=("--threads", str(THREADS), *worker_flags),
        **counts,
    )
    stack = LocalStack(config, clock=CLOCK)
    try:
        addresses = await stack.start()
        async with AsyncClient(addresses.grpc) as client:
            yield System(connector, client, stack.dtype)
    finally:
        await stack.stop(10.0)


def say(text: str) -> None:
    """Print progress, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


async def measure(given: argparse.Namespace, names: Sequence[str]) -> tuple[list[System], list[float]]:
    """Measure all systems; return them with the memory read rates measured between the rounds."""
    begun = CLOCK.monotonic()
    torch.set_num_threads(THREADS)
    data, rates = torch.ones(READ_BYTES // 4), []
    flags = (
        "--dtype",
        given.dtype,
        "--kv-memory",
        given.kv_memory,
        "--device",
        given.device,
        "--load-policy",
        "always",
    )

    def progress(text: str) -> None:
        say(f"{CLOCK.monotonic() - begun:5.0f} s  {text}")

    async with AsyncExitStack() as stacks:
        systems: list[System] = []
        for name in names:
            progress(f"starting the stack of connector {name}")
            systems.append(await stacks.enter_async_context(a_system(name, given.model, flags)))
            if given.warm_up:
                progress(f"warming up connector {name}")
                await one_repetition(systems[-1], given.prompts, -1)
                systems[-1].values.clear()
                systems[-1].went_round.clear()
        for repetition in range(given.repetitions):
            rates.append(read_rate(data))
            # The order rotates, so that no system is always measured right after the same other one.
            for system in systems[repetition % len(systems) :] + systems[: repetition % len(systems)]:
                progress(f"repetition {repetition + 1} of {given.repetitions}, connector {system.connector}")
                await one_repetition(system, given.prompts, repetition)
        say("")
    return systems, rates


async def one_repetition(system: System, prompts: Sequence[int], repetition: int) -> None:
    """Measure every cell once; the default prompts have more tokens than a pool of the default size holds, so that
    every page is used."""
    for length in prompts:
        await first_tokens(system, length, repetition)
    await decode_rates(system, repetition)


def rows(systems: Sequence[System], rates: Sequence[float], model: str, device: str) -> list[Row]:
    """Return the rows of the CSV file; a GPU's rows have its name and no bound."""
    dtype, on_gpu = systems[0].dtype, device != "cpu"
    common = {
        "date": datetime.fromtimestamp(CLOCK.wall(), UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "dtype": dtype,
        "load_average": round(os.getloadavg()[0], 2),
    }
    steps = statistics.median(rates) / weight_bytes(model, dtype)
    bounds = {} if on_gpu else {"decode, 1 stream": steps, f"decode, {STREAMS} streams": STREAMS * steps}

    def row(connector: str, cell: str, unit: str, values: Sequence[float]) -> Row:
        middle, bound = statistics.median(values), bounds.get(cell)
        return Row(
            connector=connector,
            cell=cell,
            median=round(middle, 4),
            min=round(min(values), 4),
            max=round(max(values), 4),
            n=len(values),
            unit=unit,
            bound=None if bound is None else round(bound, 2),
            share_of_bound=None if bound is None else round(middle / bound, 3),
            **common,  # type: ignore[arg-type]
        )

    made = [row("", f"memory read, {THREADS} threads", "GB/s", [rate / 1e9 for rate in rates])]
    made += [row(s.connector, cell, unit, v) for s in systems for (cell, unit), v in s.values.items()]
    return made + [
        row(s.connector, "not by hand-off", "requests", [len(s.went_round)])
        for s in systems
        if s.connector != AGGREGATED
    ]


def table(made: Sequence[Row], names: Sequence[str]) -> str:
    """Return a table with a row per cell and a column per connector: median (least to most) and share of the bound."""
    cells = list(dict.fromkeys((r.cell, r.unit) for r in made if r.connector))
    found = {(r.connector, r.cell, r.unit): r for r in made}
    lines = [f"{'':<32}" + "".join(f"{name:>32}" for name in names)]
    for cell, unit in cells:
        shown = []
        for name in names:
            r = found.get((name, cell, unit))
            share = "" if r is None or r.share_of_bound is None else f" {100 * r.share_of_bound:.0f} %"
            shown.append("" if r is None else f"{r.median:.4g} ({r.min:.4g} to {r.max:.4g}){share}")
        lines.append(f"{f'{cell}, {unit}':<32}" + "".join(f"{text:>32}" for text in shown))
    read = next(r for r in made if not r.connector)
    bound = next((r.bound for r in made if r.cell == "decode, 1 stream"), None)
    limit = "" if bound is None else f", so at most {bound} tokens/s for one stream"
    lines.append(
        f"\n{read.cpu}, {read.dtype}, commit {read.commit}, load average {read.load_average}; {read.cell}: "
        f"{read.median:.3g} GB/s{limit}; median (least to most) of {read.n}"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="2 repetitions")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--connectors", default=",".join(CONNECTORS), help="comma-separated; %(default)s")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu", help="device of all workers: cpu or cuda; %(default)s")
    parser.add_argument(
        "--prompts",
        default=PROMPTS,
        type=lambda text: tuple(int(part) for part in text.split(",")),
        help="comma-separated lengths in tokens; default: 32,256,1024",
    )
    parser.add_argument("--kv-memory", default="48MiB", help="KV memory of each engine; %(default)s")
    parser.add_argument(
        "--no-warm-up",
        dest="warm_up",
        action="store_false",
        help="skip the unrecorded repetition",
    )
    parser.add_argument("--csv", type=Path, default=RESULTS, metavar="FILE", help="CSV file to which rows are appended")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to which this run's rows are written too")
    given = parser.parse_args()
    names = [AGGREGATED, *(name for name in given.connectors.split(",") if name)]
    if given.quick:
        given.repetitions = 2
    systems, rates = asyncio.run(measure(given, names))
    made = rows(systems, rates, given.model, given.device)
    append_csv(given.csv, [asdict(r) for r in made])
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(r) for r in made], indent=1) + "\n")
    print(table(made, names))
    for system in systems:
        for timing in system.went_round:
            print(f"{system.connector}, not by hand-off: {timing}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
