"""Speculation on and off, in turn: output tokens per second and accepted length, by workload and batch size.

    make bench-speculation                        rows appended to tests/bench/results/speculation.csv
    make bench-speculation ARGS="--repetitions 5 --batches 1 16 --methods auto ngram"

Every method has an engine of its own with the same weights, and all take turns within each repetition. A figure is the
median over repetitions of the tokens per second after the first tokens; ratios are medians of the ratios within a
repetition. The outputs of all methods must be equal.
"""

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random

from harness.machine import cpu_name

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.core.clock import SystemClock
from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM
from kvferry.engine.schedule.messages import EngineRequest

RESULTS = Path(__file__).parent / "results" / "speculation.csv"
MODEL = "smollm2-135m-instruct"
TOKENS = 160
CLOCK = SystemClock()
CODE = """def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return width * height


def perimeter(width, height):
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return 2 * (width + height)


def diagonal(width, height):
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return (width * width + height * height) ** 0.5
"""
STORY = (
    "The lighthouse keeper wrote one line in his book each evening. When the storm came, he lit the lamp an hour "
    "early, and the fishing boats turned back to the harbour. In the morning the village brought him bread, and he "
    "wrote a second line in his book, which was the only time that he did so."
)
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "last_name": {"type": "string", "maxLength": 12},
        "date_of_birth": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
        "is_subscribed_to_newsletter": {"type": "boolean"},
        "shipping_address": {
            "type": "object",
            "properties": {
                "street_and_number": {"type": "string", "maxLength": 20},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country": {"enum": ["Germany", "France", "Italy"]},
            },
            "required": ["street_and_number", "postal_code", "country"],
            "additionalProperties": False,
        },
    },
    "required": ["first_name", "last_name", "date_of_birth", "is_subscribed_to_newsletter", "shipping_address"],
    "additionalProperties": False,
}
SCHEMA = json.dumps({"type": "array", "items": PERSON, "minItems": 100})


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one kind and their sampling parameters."""

    prompts: tuple[str | list[int], ...]
    """One per sequence of the largest batch."""
    sampling: SamplingParams


def workloads(most: int) -> dict[str, Workload]:
    """Return the workloads with `most` prompts each."""
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    drawn = SamplingParams(temperature=0.8, seed=11, max_tokens=TOKENS, ignore_eos=True)
    draw = Random(5)
    questions = ("how tides work", "what a prime number is", "why leaves change colour", "how bread rises")

    def numbered(text: str) -> tuple[str, ...]:
        return tuple(f"({number})\n{text}" for number in range(most))

    return {
        "copy": Workload(numbered(f"{CODE}\n\n# The same three functions again:\n\n{CODE[:130]}"), greedy),
        "quote": Workload(numbered(f"Text: {STORY}\n\nQuote the text word by word: {STORY[:60]}"), greedy),
        "json": Workload(
            numbered("A list of customers as JSON:"),
            SamplingParams(
                temperature=0.0,
                max_tokens=TOKENS,
                constraint=Constraint(ConstraintKind.JSON_SCHEMA, SCHEMA),
            ),
        ),
        "chat": Workload(
            tuple(
                f"<|im_start|>user\nExplain {questions[n % 4]} to pupil {n}.<|im_end|>\n<|im_start|>assistant\n"
                for n in range(most)
            ),
            greedy,
        ),
        "chat, sampled": Workload(
            tuple(
                f"<|im_start|>user\nExplain {questions[n % 4]} to pupil {n}.<|im_end|>\n<|im_start|>assistant\n"
                for n in range(most)
            ),
            drawn,
        ),
        "random": Workload(
            tuple([draw.randrange(1000, 40_000) for _ in range(64)] for _ in range(most)),
            SamplingParams(temperature=2.0, seed=3, max_tokens=TOKENS, ignore_eos=True),
        ),
    }


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of one run, a row of the CSV file."""

    date: str
    commit: str
    cpu: str
    weights: str
    workload: str
    batch: int
    method: str
    tokens_per_second: float
    ratio_to_off: float
    tokens_per_step: float
    n: int
    load_average: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One measured batch."""

    rate: float
    """Output tokens per second after the first tokens."""
    per_step: float
    """Output tokens per sequence and step."""
    tokens: tuple[tuple[int, ...], ...]


def measure(llm: LLM, prompts: Sequence[str | list[int]], sampling: SamplingParams, name: str) -> Turn:
    """Decode a batch."""
    llm.engine.reset_prefix_cache()
    outputs: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        ids = prompt if isinstance(prompt, list) else llm.tokenizer.encode(prompt, add_special=False)
        request_id = RequestId(f"{name}-{number}")
        outputs[request_id] = []
        llm.engine.add(EngineRequest(request_id, list(ids), sampling, sample_index=number))
    first = count = steps = 0.0
    while llm.engine.has_work:
        output = llm.engine.step()
        for update in output.updates:
            assert update.error is None, update.error
            outputs[update.request_id] += [token.token_id for token in update.tokens]
        if not first:
            first = CLOCK.monotonic() if all(outputs.values()) else 0.0
            continue
        count += sum(len(update.tokens) for update in output.updates)
        steps += len(output.updates)
    return Turn(count / (CLOCK.monotonic() - first), count / steps, tuple(map(tuple, outputs.values())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--methods", nargs="+", default=["auto", "suffix", "ngram"])
    parser.add_argument("--weights", nargs="+", default=["shipped", "bfloat16"])
    parser.add_argument("--workloads", nargs="+", default=list(workloads(1)))
    parser.add_argument("--no-csv", action="store_true", help="print rows without appending them")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for weights in arguments.weights:
        engines = {
            method: LLM(MODEL, weights=weights, speculation=method, kv_memory=1 << 28)
            for method in ("off", *arguments.methods)
        }
        for name, workload in workloads(max(arguments.batches)).items():
            if name not in arguments.workloads:
                continue
            for batch in arguments.batches:
                turns: dict[str, list[Turn]] = {method: [] for method in engines}
                for repetition in range(-1, arguments.repetitions):  # the first repetition is not recorded
                    for method, llm in engines.items():
                        turn = measure(llm, workload.prompts[:batch], workload.sampling, f"{name}-{repetition}")
                        if repetition >= 0:
                            turns[method].append(turn)
                for method, own in turns.items():
                    assert own[0].tokens == turns["off"][0].tokens, f"{method} changed the output of {name}"
                    ratio = statistics.median(a.rate / b.rate for a, b in zip(own, turns["off"], strict=True))
                    rate = statistics.median(turn.rate for turn in own)
                    rows.append(
                        Row(
                            datetime.now(UTC).isoformat(timespec="seconds"), commit(), cpu_name(), weights, name, batch,
                            method, rate, ratio, own[0].per_step, arguments.repetitions, os.getloadavg()[0],
                        )
                    )  # fmt: skip
                    print(
                        f"{weights:9} {name:14} batch {batch:3} {method:10} {rate:8.1f} tokens/s"
                        f"  x {ratio:5.2f}  {own[0].per_step:5.2f} tokens per step",
                        flush=True,
                    )
    if not arguments.no_csv:
        append_csv(RESULTS, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
