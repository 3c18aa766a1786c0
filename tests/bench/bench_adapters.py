"""Decode steps and prompts with and without LoRA adapters, in turn: the time that adapters add to a step.

    make bench-adapters                           rows appended to tests/bench/results/adapters.csv
    make bench-adapters ARGS="--repetitions 10 --ranks 8 64"

Two engines with the real model compute the same 16 prompts, one without adapters, one with 8 adapters of random
weights, two sequences each. They take turns step by step, so that other work on the machine slows both; the ratio is
the median of the ratios of adjacent steps. `all` updates every linear layer of attention and MLP, `qv` queries and
values.
"""

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.kernels.lora_files import LINEARS, write
from harness.machine import cpu_name

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.core.clock import SystemClock
from kvferry.core.hashing import cache_scope
from kvferry.core.ids import AdapterId, RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM
from kvferry.engine.schedule.messages import EngineRequest

RESULTS = Path(__file__).parent / "results" / "adapters.csv"
MODEL = "smollm2-135m-instruct"
ROWS, ADAPTERS = 16, 8
TOKENS, PROMPT_TOKENS = 48, 64
CLOCK = SystemClock()
SAMPLING = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
TARGETS = {"qv": ("q_proj", "v_proj"), "all": LINEARS}


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of one run, a row of the CSV file."""

    date: str
    commit: str
    cpu: str
    kernels: str
    cell: str
    without_ms: float
    with_ms: float
    throughput_ratio: float
    n: int
    load_average: float


def begin(llm: LLM, adapters: Sequence[AdapterId | None], name: str) -> None:
    """Add a batch of prompts, none of which is cached."""
    for number, adapter in enumerate(adapters):
        prompt = [1000 + 7 * number + i for i in range(PROMPT_TOKENS)]
        scope = cache_scope("", name, adapter)
        llm.engine.add(EngineRequest(RequestId(f"{name}-{number}"), prompt, SAMPLING, tenant=scope, adapter=adapter))


def timed_step(llm: LLM) -> tuple[float, bool]:
    """Run a step; return its duration in seconds, and whether all of its sequences were decoding."""
    is_decode = all(s.kv.num_computed >= PROMPT_TOKENS for s in llm.engine.scheduler._admitted.running) and not (
        llm.engine.scheduler.num_waiting
    )
    begun = CLOCK.monotonic()
    llm.engine.step()
    return CLOCK.monotonic() - begun, is_decode


def compare(plain: LLM, adapted: LLM, given: Sequence[AdapterId], name: str) -> dict[str, list[tuple[float, float]]]:
    """Compute a batch without and with adapters, step by step in turn; return the seconds of both, for the prompts
    together and for each decode step."""
    begin(plain, [None] * len(given), name)
    begin(adapted, given, name)
    prompts = [0.0, 0.0]
    steps: list[tuple[float, float]] = []
    while plain.engine.has_work and adapted.engine.has_work:
        (first, is_decode), (second, _) = timed_step(plain), timed_step(adapted)
        if is_decode:
            steps.append((first, second))
        else:
            prompts = [prompts[0] + first, prompts[1] + second]
    return {"prompts": [(prompts[0], prompts[1])], "step": steps[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--targets", choices=TARGETS, nargs="+", default=list(TARGETS))
    arguments = parser.parse_args()
    rows: list[Row] = []
    with TemporaryDirectory() as folder:
        made = [
            LLM(
                MODEL,
                kv_memory=128 << 20,
                async_steps="off",  # otherwise a step of one engine would overlap with one of the other
                max_adapter_rank=max(arguments.ranks),
                adapter_slots=ADAPTERS,
            )
            for _ in range(2)
        ]
        plain, adapted = made
        for target in arguments.targets:
            for rank in arguments.ranks:
                for number in range(ADAPTERS):
                    path = Path(folder) / f"{target}-{rank}-{number}"
                    write(path, adapted.config, seed=number, rank=rank, linears=TARGETS[target], spread=0.02)
                    adapted.load_adapter(f"a{number}", str(path))
                assert adapted.engine.adapters is not None
                given = [adapted.engine.adapters.resolve(f"a{i % ADAPTERS}") for i in range(ROWS)]
                found: dict[str, list[tuple[float, float]]] = {"prompts": [], "step": []}
                for repetition in range(-1, arguments.repetitions):  # the first repetition is not recorded
                    for part, pairs in compare(plain, adapted, given, f"{target}-{rank}-{repetition}").items():
                        found[part] += pairs if repetition >= 0 else []
                for part, pairs in found.items():
                    cell = f"{part}, {target}, rank {rank}"
                    without, with_adapters = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
                    ratio = statistics.median(pair[0] / pair[1] for pair in pairs)
                    date = datetime.now(UTC).isoformat(timespec="seconds")
                    rows.append(
                        Row(
                            date, commit(), cpu_name(), adapted.model.kernels, cell, 1e3 * without,
                            1e3 * with_adapters, ratio, len(pairs), os.getloadavg()[0],
                        )
                    )  # fmt: skip
                    print(
                        f"{cell:24} without {1e3 * without:8.2f} ms   with {1e3 * with_adapters:8.2f} ms   {ratio:.3f}"
                    )
    append_csv(RESULTS, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
