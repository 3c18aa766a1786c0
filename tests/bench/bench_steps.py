"""Durations of an engine's steps by their work, and the device profile that `kvferry simulate` reads.

    make bench-steps                              rows appended to tests/bench/results/steps.csv, and a profile
    make bench-steps ARGS="--model PATH --profile my-machine.toml"
    make bench-steps ARGS="--fit-only"            fit the profile again from the rows of this CPU and model

Batches of different sizes decode after prompts of different lengths, and chunks of prompts are computed alone and
beside decoding sequences, so that tokens, KV tokens and pairs vary independently of each other. The profile is a
non-negative least-squares fit of relative errors (`kvferry.simulator.worker.fitting`).
"""

import argparse
import csv
import os
import statistics
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from random import Random

from harness.machine import cpu_name

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.core.clock import SystemClock
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.plan.pipeline import StepRunner
from kvferry.engine.schedule.step.step import StepPlan, StepResult
from kvferry.simulator.worker.device import StepWork, work_of
from kvferry.simulator.worker.fitting import Fit, fit

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "steps.csv"
PROFILES = FOLDER.parents[1] / "services/kvferry/simulator/profiles"
CLOCK = SystemClock()
SHAPES = [(1, 16), (1, 512), (1, 1536), (2, 128), (4, 512), (8, 64), (8, 256), (16, 64), (16, 192), (32, 32)]
"""Batch size and prompt length of each run."""
STEPS = 12


class Timed:
    """Runner that records the work and the seconds of each step."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self.rows: list[tuple[StepWork, float]] = []

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        work, begun = work_of(plan.scheduled), CLOCK.monotonic()
        result = self._runner.run(plan)
        self.rows.append((work, CLOCK.monotonic() - begun))
        return result


def requests(batch: int, tokens: int, draw: Random, prefix: str) -> Iterator[EngineRequest]:
    for index in range(batch):
        yield EngineRequest(
            RequestId(f"{prefix}-{index}"),
            [draw.randrange(300, 4300) for _ in range(tokens)],
            SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True),
        )


def measure(model: str, repetitions: int) -> list[tuple[StepWork, float]]:
    llm = LLM(model, async_steps="off")
    timed = Timed(llm.engine._pipeline._runner)
    llm.engine._pipeline._runner = timed
    draw, rows = Random(0), []
    for repetition in range(repetitions + 1):
        timed.rows.clear()
        for batch, tokens in SHAPES:
            for request in requests(batch, tokens, draw, f"{repetition}-{batch}-{tokens}"):
                llm.engine.add(request)
            late = list(requests(1, tokens, draw, f"{repetition}-{batch}-{tokens}-late"))
            for number in range(10 * STEPS * batch):
                if number == STEPS // 2:  # a prompt beside decoding sequences
                    llm.engine.add(late[0])
                if not llm.engine.has_work:
                    break
                llm.engine.step()
            llm.engine.reset_prefix_cache()
        if repetition:  # the first repetition warms up
            rows += timed.rows
    return rows


def medians(rows: list[tuple[StepWork, float]]) -> list[tuple[StepWork, float]]:
    """Return the median duration of steps with equal work, because other processes delay single steps."""
    by_work: dict[StepWork, list[float]] = {}
    for work, seconds in rows:
        by_work.setdefault(work, []).append(seconds)
    return [(work, statistics.median(seconds)) for work, seconds in by_work.items()]


def read_rows(path: Path, model: str) -> tuple[list[tuple[StepWork, float]], float]:
    """Return the rows of the last run, and the load average of the machine."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model and row["cpu"] == cpu_name()]
    last = max(row["date"] for row in rows)
    rows = [row for row in rows if row["date"] == last]
    return [
        (StepWork(int(row["tokens"]), int(row["kv_tokens"]), int(row["pairs"])), float(row["ms"]) / 1e3) for row in rows
    ], statistics.fmean(float(row["load_average"]) for row in rows)


def profile_text(model: str, found: Fit, date: str, load: float) -> str:
    p = found.profile
    return (
        f"# {model} on {cpu_name()}, fitted by tests/bench/bench_steps.py to rows of tests/bench/results/steps.csv.\n"
        f"step_ms = {1e3 * p.step:.4f}\ntoken_us = {1e6 * p.token:.3f}\n"
        f"kv_token_ns = {1e9 * p.kv_token:.3f}\npair_ns = {1e9 * p.pair:.3f}\n\n"
        f'[measured]\ndate = "{date}"\nkinds_of_steps = {found.num_steps}\n'
        f"median_error = {found.median_error:.3f}\np90_error = {found.p90_error:.3f}\nload_average = {load:.1f}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--profile", type=Path, help="Profile to write; default: the shipped one for model and CPU.")
    parser.add_argument("--fit-only", action="store_true", help="Use the rows of the last run.")
    arguments = parser.parse_args()
    model, date = arguments.model, datetime.now(UTC).isoformat(timespec="seconds")
    if not arguments.fit_only:
        rows = medians(measure(model, arguments.repetitions))
        append_csv(
            arguments.csv,
            [
                {
                    "date": date, "commit": commit(), "cpu": cpu_name(), "model": model, "tokens": work.tokens,
                    "kv_tokens": work.kv_tokens, "pairs": work.pairs, "ms": round(1e3 * seconds, 4),
                    "load_average": os.getloadavg()[0],
                }
                for work, seconds in rows
            ],
        )  # fmt: skip
    rows, load = read_rows(arguments.csv, model)
    found = fit(rows)
    text = profile_text(model, found, date[:10], load)
    path = arguments.profile or PROFILES / f"{Path(model).stem}-cpu.toml"
    path.write_text(text, "utf-8")
    print(text, f"written to {path}", sep="")


if __name__ == "__main__":
    main()
