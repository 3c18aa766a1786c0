"""Run requests with all features through `kvferry up` for minutes: `python -m harness.endurance [--seconds 600]`.

    make endurance ARGS="--seconds 60"
    make endurance ARGS="--fault-seconds 5"       also kill a worker, or stop it for some seconds, every 5 seconds

64 streams run at a time over two prefill and two decode workers with tiers, drafts, priorities, adapters and pinned
prefixes, and so few pages that sequences are preempted. Every answer must equal that of the same request alone in one
worker. At the end, no worker may hold a resource, and the memory of no process may have grown. The exit status is 1
otherwise.
"""

import asyncio
import signal
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import click
import httpx
import psutil

from harness.endurance.cases import Case, draw_cases, draw_heads
from harness.idle import assert_workers_idle
from harness.kernels.lora_files import write
from harness.servers.processes import running
from kvferry.client import AsyncClient
from kvferry.core.clock import SystemClock
from kvferry.core.errors import KvferryError
from kvferry.model import tiny

CLOCK = SystemClock()
ADAPTERS = ("first", "second")
COMMON = (
    *("--model", "tiny", "--dtype", "float32", "--threads", "1"),
    *("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json", "--log-level", "error"),
)
ALONE = ("--both", "1", "--prefill", "0", "--decode", "0")
TOGETHER = (
    *("--prefill", "2", "--decode", "2", "--kv-memory", "3MiB", "--tier", "dram://?size=16MiB"),
    *("--load-policy", "always", "--speculation", "auto", "--scheduling", "priority"),
)
SAMPLE_SECONDS = 2.0
PIN_SECONDS = 0.5
SPARE_BYTES = 16 << 20
GROWTH = 1.1
"""Limit of the memory in the last fifth of the run divided by that in the second fifth, plus `SPARE_BYTES`."""
REQUEST_SECONDS = 120.0
IDLE_SECONDS = 60.0
"""Time limit for workers to become idle, with the restart of a killed one."""

Answer = dict[int, list[int]]
"""Token ids by sample."""


@dataclass
class Report:
    """Results of the run."""

    features: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    memory: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))


async def expected_answers(address: str, cases: Sequence[Case]) -> dict[int, Answer]:
    """Return the answers of requests that are sent one after the other."""
    found: dict[int, Answer] = {}
    async with AsyncClient(address, timeout=REQUEST_SECONDS) as client:
        for case in cases:
            made = await client.complete(
                case.prompt, case.sampling, n=case.n, model=case.model, beams=case.beams, tools=case.tools,
                tool_choice=case.tool_choice,
            )  # fmt: skip
            found[case.number] = {one.index: one.token_ids for one in made}
    return found


async def ask(client: AsyncClient, case: Case, expected: Answer, leaves_after: int | None, report: Report) -> None:
    """Send a request and compare its tokens until the end, or until the client disconnects."""
    tokens: Answer = defaultdict(list)
    stream = client.generate(
        case.prompt, case.sampling, n=case.n, model=case.model, priority=case.priority, cache_salt=case.cache_salt,
        beams=case.beams, tools=case.tools, tool_choice=case.tool_choice,
    )  # fmt: skip
    has_left = False
    try:
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                tokens[chunk.index] += [token.token_id for token in chunk.tokens]
                if chunk.timing is not None:
                    report.outcomes[f"hand-off {chunk.timing.handoff_outcome or 'none'}"] += 1
                    report.outcomes.update(f"blocks from {kv.source}" for kv in chunk.timing.kv if kv.blocks_loaded)
                if leaves_after is not None and sum(map(len, tokens.values())) > leaves_after:
                    has_left = True
                    break
    except KvferryError as error:
        report.wrong.append(f"request {case.number} {case.features}: {error.reason}: {error.message}")
        return
    report.outcomes["left" if has_left else "whole"] += 1
    report.features.update(case.features)
    report.num_tokens += sum(map(len, tokens.values()))
    for index, whole in expected.items():
        found = tokens[index]
        if found != (whole[: len(found)] if has_left else whole):
            report.wrong.append(f"request {case.number} {case.features}, sample {index}: {found}, not {whole}")


async def run(
    address: str, cases: Sequence[Case], expected: dict[int, Answer], seconds: float, streams: int, report: Report
) -> None:
    """Keep `streams` requests running for `seconds`."""
    rng = Random(1)
    deadline = CLOCK.monotonic() + seconds

    async def one_stream(client: AsyncClient) -> None:
        while CLOCK.monotonic() < deadline:
            case = rng.choice(cases)
            leaves = rng.randrange(4) if rng.random() < 0.1 else None
            await ask(client, case, expected[case.number], leaves, report)

    async with AsyncClient(address, timeout=REQUEST_SECONDS) as client:
        await asyncio.gather(*(one_stream(client) for _ in range(streams)))


async def pin(admin: str, heads: Sequence[Sequence[int]], report: Report) -> None:
    """Pin a prefix for two seconds, again and again."""
    rng = Random(2)
    async with httpx.AsyncClient(base_url=f"http://{admin}", timeout=REQUEST_SECONDS) as http:
        while True:
            body = {"prompt": list(rng.choice(heads)), "ttl_seconds": 2}
            answer = await http.post("/pin_prefix", json=body)
            report.outcomes[f"pin {answer.json().get('error', {}).get('code', 'ok')}"] += 1
            await asyncio.sleep(PIN_SECONDS)


async def watch(parent: psutil.Process, report: Report) -> None:
    """Record the memory of the stack's processes."""
    while True:
        for child in parent.children():
            with suppress(psutil.NoSuchProcess):  # it was killed
                words = child.cmdline()
                role = (
                    words[words.index("--role") + 1] if "--role" in words else "gateway" if "gateway" in words else "up"
                )
                report.memory[f"{role} {child.pid}"].append(child.memory_info().rss)
        await asyncio.sleep(SAMPLE_SECONDS)


async def disturb(parent: psutil.Process, interval: float, report: Report) -> None:
    """Every `interval` seconds, kill a worker, which is restarted, or stop it for up to four seconds."""
    rng = Random(3)
    while True:
        await asyncio.sleep(interval)
        workers = [child for child in parent.children() if "--role" in child.cmdline()]
        worker = rng.choice(workers)
        with suppress(psutil.NoSuchProcess):
            if rng.random() < 0.5:
                worker.send_signal(signal.SIGKILL)
                report.outcomes["workers killed"] += 1
                continue
            worker.send_signal(signal.SIGSTOP)
            report.outcomes["workers stopped"] += 1
            try:
                await asyncio.sleep(rng.uniform(0.1, 4.0))
            finally:
                worker.send_signal(signal.SIGCONT)


def early_and_late(memory: Sequence[int]) -> tuple[float, float]:
    """Return the medians of a process's memory in the second and in the last fifth of a run, in bytes."""
    fifth = max(1, len(memory) // 5)
    return statistics.median(memory[fifth : 2 * fifth] or memory), statistics.median(memory[-fifth:])


@click.command()
@click.option("--seconds", default=600.0, show_default=True)
@click.option("--streams", default=64, show_default=True)
@click.option("--cases", "count", default=300, show_default=True, help="Distinct requests.")
@click.option("--seed", default=7, show_default=True)
@click.option("--connector", default="shm", show_default=True)
@click.option("--fault-seconds", default=0.0, show_default=True, help="Interval of faults of workers; 0: none.")
def main(seconds: float, streams: int, count: int, seed: int, connector: str, fault_seconds: float) -> None:
    """Run all features at once and compare every answer with that of the request alone."""
    report = Report()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for number, name in enumerate(ADAPTERS):
            write(folder / name, tiny.config(), seed=number)
        cases = draw_cases(count, seed, ADAPTERS)
        adapters = [word for name in ADAPTERS for word in ("--adapter", f"{name}={folder / name}")]
        click.echo(f"{count} requests, one after the other")
        with running("up", *COMMON, *ALONE, *adapters) as stack:
            expected = asyncio.run(expected_answers(str(stack.wait_for("ready")["grpc"]), cases))
            assert stack.stop() == 0
        with running("up", *COMMON, *TOGETHER, "--connector", connector, *adapters) as stack:
            ready = stack.wait_for("ready")
            workers = ready["workers"]
            assert isinstance(workers, dict)
            click.echo(f"{streams} streams for {seconds:.0f} s")
            pinning = str(ready["admin"]), draw_heads(seed)
            parent = psutil.Process(stack.process.pid)
            beside = [watch(parent, report), pin(*pinning, report)]
            if fault_seconds:
                beside.append(disturb(parent, fault_seconds, report))
            asking = run(str(ready["grpc"]), cases, expected, seconds, streams, report)
            asyncio.run(run_beside(asking, beside, report))
            assert_workers_idle(workers.values(), within_seconds=IDLE_SECONDS)
            assert stack.stop() == 0
    sys.exit(_print(report, has_faults=fault_seconds > 0))


async def run_beside(
    asking: Coroutine[Any, Any, None], others: Sequence[Coroutine[Any, Any, None]], report: Report
) -> None:
    """Run coroutines that do not end beside one that does."""
    beside = [asyncio.create_task(other) for other in others]
    try:
        await asking
    finally:
        for task in beside:
            task.cancel()
        for found in await asyncio.gather(*beside, return_exceptions=True):
            if not isinstance(found, asyncio.CancelledError):
                report.wrong.append(f"{found!r}")


def _print(report: Report, *, has_faults: bool) -> int:
    for name, number in sorted({**report.outcomes, **report.features}.items()):
        click.echo(f"{name:28s} {number}")
    click.echo(f"{'tokens':28s} {report.num_tokens}")
    has_grown = False
    for name, values in report.memory.items():
        early, late = early_and_late(values)
        is_whole = not has_faults or name.startswith(("gateway", "up"))  # a restarted worker's memory grows at first
        grew = is_whole and late > GROWTH * early + SPARE_BYTES
        has_grown |= grew
        click.echo(f"{name:28s} {early / 2**20:.0f} MiB, then {late / 2**20:.0f}{'  GREW' if grew else ''}")
    click.echo(f"{'wrong or failed':28s} {len(report.wrong)}")
    for line in report.wrong[:10]:
        click.echo(line)
    return int(bool(report.wrong) or has_grown)


if __name__ == "__main__":
    main()
