"""Decode steps with and without constraints, in turn: the time that masks add to a step.

    make bench-constraints                        rows appended to tests/bench/results/constraints.csv
    make bench-constraints ARGS="--repetitions 10 --batches 1 16"

One engine with the real model decodes the same prompts free and under a JSON Schema whose outputs do not end. Both take
turns within each repetition; the figure is the median time of a decode step. `compile` is the time to compile the
schema for the model's vocabulary when the vocabulary is prepared.
"""

import argparse
import json
import os
import statistics
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from harness.machine import cpu_name

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.core.clock import SystemClock
from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.text.grammar.compiler import GrammarCompiler

RESULTS = Path(__file__).parent / "results" / "constraints.csv"
MODEL = "smollm2-135m-instruct"
TOKENS = 64
CLOCK = SystemClock()
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "count": {"type": "integer"},
        "kind": {"enum": ["fruit", "tool", "toy"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
ENDLESS = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "array", "items": ITEM, "minItems": 1000}))
FREE = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
CONSTRAINED = replace(FREE, constraint=ENDLESS)


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of one run, a row of the CSV file."""

    date: str
    commit: str
    cpu: str
    cell: str
    free_ms: float
    constrained_ms: float
    added_percent: float
    n: int
    load_average: float


def decode_step(llm: LLM, batch: int, sampling: SamplingParams, name: str) -> float:
    """Decode a batch; return the median seconds of its steps with all sequences."""
    prompt = llm.tokenizer.encode("A list of things as JSON:", add_special=True)
    for number in range(batch):
        llm.engine.add(EngineRequest(RequestId(f"{name}-{number}"), [*prompt, 1000 + number], sampling))
    seconds: list[float] = []
    while llm.engine.has_work:
        begun = CLOCK.monotonic()
        updates = llm.engine.step().updates
        if len(updates) == batch and all(update.error is None for update in updates):
            seconds.append(CLOCK.monotonic() - begun)
    return statistics.median(seconds[1:])  # the first step computes the prompts


def compile_seconds(llm: LLM, repetitions: int) -> float:
    compiler = GrammarCompiler(llm.tokenizer)
    compiler.check(Constraint(ConstraintKind.JSON_OBJECT, ""))
    found: list[float] = []
    for number in range(repetitions):
        begun = CLOCK.monotonic()
        compiler.check(replace(ENDLESS, source=ENDLESS.source + " " * number))
        found.append(CLOCK.monotonic() - begun)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    arguments = parser.parse_args()
    llm = LLM(MODEL)
    rows: list[Row] = []

    def note(cell: str, free: float, constrained: float) -> None:
        added = 100 * (constrained / free - 1) if free else 0.0
        load = os.getloadavg()[0]
        date = datetime.now(UTC).isoformat(timespec="seconds")
        rows.append(
            Row(date, commit(), cpu_name(), cell, 1e3 * free, 1e3 * constrained, added, arguments.repetitions, load)
        )
        print(f"{cell:20} free {1e3 * free:8.3f} ms   constrained {1e3 * constrained:8.3f} ms   {added:+.1f} %")

    for batch in arguments.batches:
        free: list[float] = []
        constrained: list[float] = []
        for repetition in range(-1, arguments.repetitions):  # the first repetition is not recorded
            pair = [
                decode_step(llm, batch, sampling, f"{batch}-{repetition}-{number}")
                for number, sampling in enumerate((FREE, CONSTRAINED))
            ]
            if repetition >= 0:
                free.append(pair[0])
                constrained.append(pair[1])
        note(f"step, {batch} sequences", statistics.median(free), statistics.median(constrained))
    note("compile", 0.0, compile_seconds(llm, arguments.repetitions))
    append_csv(RESULTS, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
