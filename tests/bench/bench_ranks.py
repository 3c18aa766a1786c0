"""A model in one process beside the same model in several ranks, with the same threads in total, in turn.

make bench-ranks                        rows appended to tests/bench/results/ranks.csv

stream      tokens per second of one stream
streams     tokens per second of eight streams together
prompt      prompt tokens per second, prompts of 1,024 tokens
"""

import argparse
import os
import statistics
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from harness.machine import cpu_name

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.core.clock import SystemClock
from kvferry.core.process.cores import usable_cores
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM

RESULTS = Path(__file__).parent / "results" / "ranks.csv"
CLOCK = SystemClock()
STREAMS, PROMPT_TOKENS = 8, 1024


@dataclass(frozen=True, slots=True)
class Row:
    """One measure of a model in some number of ranks, a row of the CSV file."""

    date: str
    commit: str
    cpu: str
    threads: int
    model: str
    dtype: str
    ranks: int
    measure: str
    tokens_per_second: float
    min: float
    max: float
    ratio: float
    """Median of the rounds' ratios to one process."""
    n: int
    load_average: float


def _prompt(seed: int, length: int) -> list[int]:
    return [(seed * 7919 + i * i * 31 + 17 * i) % 40_000 + 500 for i in range(length)]


def rate(llm: LLM, seed: int, *, streams: int, prompt: int, output: int) -> float:
    """Return tokens per second: of the outputs, or of the prompts if there is one token of output."""
    prompts = [_prompt(seed * 100 + number, prompt) for number in range(streams)]
    begun = CLOCK.monotonic()
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True))
    return streams * (output if output > 1 else prompt) / (CLOCK.monotonic() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-1b", help="a shape with random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    threads = usable_cores()
    settings = {"load_format": "dummy", "dtype": arguments.dtype, "kv_memory": 512 << 20, "max_model_len": 2048}
    models = {
        size: LLM(arguments.shape, threads=threads, tensor_parallel=size, **settings) for size in (1, *arguments.ranks)
    }
    measures = {
        "stream": {"streams": 1, "prompt": 16, "output": 48},
        "streams": {"streams": STREAMS, "prompt": 16, "output": 24},
        "prompt": {"streams": 1, "prompt": PROMPT_TOKENS, "output": 1},
    }
    found: dict[tuple[str, int], list[float]] = {}
    for round_ in range(arguments.rounds + 1):
        for name, measure in measures.items():
            for size, llm in models.items():
                seen = rate(llm, round_ * 10 + size, **measure)
                if round_:  # the first round warms up
                    found.setdefault((name, size), []).append(seen)
    rows = [
        Row(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=commit(),
            cpu=cpu_name(),
            threads=threads,
            model=arguments.shape,
            dtype=arguments.dtype,
            ranks=size,
            measure=name,
            tokens_per_second=round(statistics.median(rates), 1),
            min=round(min(rates), 1),
            max=round(max(rates), 1),
            ratio=round(statistics.median(a / b for a, b in zip(rates, found[name, 1], strict=True)), 3),
            n=len(rates),
            load_average=round(os.getloadavg()[0], 2),
        )
        for (name, size), rates in found.items()
    ]
    append_csv(RESULTS, [asdict(row) for row in rows])
    for row in rows:
        print(
            f"{row.measure:8} {row.ranks} ranks: {row.tokens_per_second:8.1f} tokens/s, {row.ratio:.3f} of one process"
        )


if __name__ == "__main__":
    main()
