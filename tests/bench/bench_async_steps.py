"""Time between a decode worker's steps in which no step computes, with asynchronous steps on and off.

    make bench-async-steps                                     batches of 1, 8 and 64 streams, three repetitions
    make bench-async-steps ARGS="--batches 1 --repetitions 5"

Two stacks of a prefill and a decode worker, with a DRAM tier, differ in `--async-steps` only. For each batch, they take
turns: streams are generated through the gateway while the decode worker records its steps (`WorkerAdmin.Profile`). The
idle time is the part of the recorded time, while all streams of the batch decode, in which the worker's runner neither
computes nor samples. All streams must have the same text with both settings. Rows are appended to
tests/bench/results/async_steps.csv.
"""

import argparse
import asyncio
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from harness.machine import cpu_name

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.cli.profile_call import profile_worker
from kvferry.client import AsyncClient
from kvferry.core.clock import SystemClock
from kvferry.core.sampling import SamplingParams
from kvferry.engine.observe.timeline import LANES, RUNNER
from kvferry.stack.local_stack import LocalStack
from kvferry.stack.plan.processes import StackConfig

RESULTS = Path(__file__).parent / "results" / "async_steps.csv"
TICKET_KEY = "async-steps-" * 4
SETTINGS = ("on", "off")
OUTPUT_TOKENS = 192
RECORDED_STEPS = 96
SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Idle:
    """Times of a run, in milliseconds; `share` is the idle part of the recorded time."""

    step_ms: float
    """Median time from the beginning of a step's computation to that of the next."""
    idle_ms: float
    """Median idle time between two steps."""
    share: float


def idle(trace: Mapping[str, object], batch: int) -> Idle:
    """Return the idle times of the runner while `batch` sequences, and no prompts, were computed.

    Raises:
        ValueError: the trace has fewer than ten such steps in succession.
    """
    events = trace["traceEvents"]
    assert isinstance(events, list)
    steps = [event for event in events if event.get("tid") == 0 and "args" in event and "decoding" in event["args"]]
    best: list[dict[str, float]] = []
    run: list[dict[str, float]] = []
    for step in steps:
        is_full = step["args"]["sequences"] == step["args"]["decoding"] == batch
        run = [*run, step] if is_full else []
        best = max(best, run, key=len)
    if len(best) < 10:
        raise ValueError(f"only {len(best)} steps in succession decoded {batch} sequences")
    begun, ended = best[0]["ts"], best[-1]["ts"] + best[-1]["dur"]
    lane = 1 + LANES.index(RUNNER)
    spans = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("tid") == lane and "ts" in e)
    inside = [span for span in spans if span[0] >= begun and span[1] <= ended]
    periods = [after[0] - before[0] for before, after in pairwise([span for span in inside if span[2] == "forward"])]
    gaps = [after[0] - before[1] for before, after in pairwise(inside) if after[2] == "forward"]
    return Idle(statistics.median(periods) / 1e3, statistics.median(gaps) / 1e3, sum(gaps) / sum(periods))


async def measure(stack: LocalStack, address: str, batch: int) -> tuple[Idle, Sequence[str]]:
    """Generate the streams of a batch while the decode worker records; return its idle times and all texts."""
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    started = asyncio.Event()

    async def generate(client: AsyncClient, number: int) -> str:
        parts = []
        async for chunk in client.generate(f"Chapter {number} of the log of the ferry:", sampling, timeout=SECONDS):
            parts.append(chunk.text)
            if len(parts) > 8:
                started.set()
        return "".join(parts)

    async with AsyncClient(address) as client:
        streams = [asyncio.create_task(generate(client, number)) for number in range(batch)]
        await started.wait()
        found = await asyncio.to_thread(
            profile_worker, stack.worker_admin["decode-0"], TICKET_KEY.encode(), None, steps=RECORDED_STEPS,
            timeout_seconds=SECONDS, resets_cache=False, has_tokens=False,
        )  # fmt: skip
        texts = await asyncio.gather(*streams)
    return idle(json.loads(found.trace), batch), texts


async def compare(model: str, batches: Sequence[int], repetitions: int) -> list[dict[str, object]]:
    """Measure both settings in turn; return a row for each batch and setting."""
    stacks, addresses = {}, {}
    found: dict[tuple[int, str], list[Idle]] = {}
    for setting in SETTINGS:
        config = StackConfig(
            model=model, http="127.0.0.1:0", grpc="127.0.0.1:0", cores=os.cpu_count() or 1, ticket_key=TICKET_KEY,
            tiers=("dram://?size=64MiB",), worker_flags=("--async-steps", setting),
        )  # fmt: skip
        stacks[setting] = LocalStack(config, clock=SystemClock())
    try:
        for setting, stack in stacks.items():
            addresses[setting] = (await stack.start()).grpc
        for batch in batches:
            for _ in range(repetitions):
                texts = {}
                for setting, stack in stacks.items():
                    one, texts[setting] = await measure(stack, addresses[setting], batch)
                    found.setdefault((batch, setting), []).append(one)
                if texts["on"] != texts["off"]:
                    raise SystemExit(f"the texts of {batch} streams differ between asynchronous steps on and off")
    finally:
        for stack in stacks.values():
            await stack.stop(30.0)
    return [
        {
            "batch": batch,
            "async_steps": setting,
            "step_ms": round(statistics.median(each.step_ms for each in runs), 3),
            "idle_ms": round(statistics.median(each.idle_ms for each in runs), 3),
            "idle_share": round(statistics.median(each.share for each in runs), 4),
            "least_share": round(min(each.share for each in runs), 4),
            "most_share": round(max(each.share for each in runs), 4),
        }
        for (batch, setting), runs in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    rows = asyncio.run(compare(arguments.model, arguments.batches, arguments.repetitions))
    common = {"date": date, "commit": commit(), "cpu": cpu_name(), "model": arguments.model}
    append_csv(arguments.csv, [{**common, **row, "load_average": os.getloadavg()[0]} for row in rows])
    print("| streams | asynchronous steps | step | idle between steps | share |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['batch']} | {row['async_steps']} | {row['step_ms']:.2f} ms | {row['idle_ms']:.3f} ms | "
            f"{row['idle_share']:.1%} ({row['least_share']:.1%} to {row['most_share']:.1%}) |"
        )


if __name__ == "__main__":
    main()
