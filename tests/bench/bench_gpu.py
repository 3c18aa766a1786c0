"""All measurements of a GPU, in one command of under nine minutes.

    make bench-gpu                          all of it; rows appended to tests/bench/results/gpu.csv
    make bench-gpu ARGS="--only kernels"    or weights, steps, parity
    make bench-gpu ARGS="--csv /tmp/gpu.csv"

kernels   every operation of the Triton backend beside torch and what else is installed (kvferry bench kernels)
weights   projections with weights of 4 and 8 bits beside 16-bit ones, and decode steps with 4-bit weights
sweep     only if named: launch choices of projections with codes, the five fastest of each kind
steps     decode steps of a random-weight 8B shape at batch 1 and 64, the engine and its host included
parity    greedy tokens of random weights in float32 beside transformers', which must be the same

At the end, each target is printed with the worst ratio of the run. Status 1: no GPU, or other tokens than
transformers'. A target that was missed is a finding, not a failure.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import torch
from harness.device.coded_rows import linear_rows, sweep
from harness.device.gpu_steps import decode_rows
from harness.device.gpu_targets import verdicts
from harness.kernels.random_parity import differing_tokens

from kvferry.bench.formulas.gpu_work import GpuRow
from kvferry.bench.gpu import kernels
from kvferry.bench.gpu.session import Session, on_gpu
from kvferry.bench.rows import append_csv
from kvferry.core.clock import SystemClock
from kvferry.core.errors import KvferryError
from kvferry.kernels.coded_weights import CodeKind
from kvferry.model.shapes import shape_of

RESULTS = Path(__file__).parent / "results" / "gpu.csv"
PARTS = ("parity", "kernels", "weights", "steps")
SWEEP = "sweep"
PARITY_SHAPE = "smollm2-135m"
STEP_SHAPE = "llama-3.1-8b"
CONTEXT, STEPS = 1024, 64
CLOCK = SystemClock()


def steps(session: Session, codes: CodeKind | None = None) -> Iterator[GpuRow]:
    return decode_rows(session, CLOCK, model=STEP_SHAPE, batches=(1, 64), context=CONTEXT, steps=STEPS, codes=codes)


def shown(rows: Iterable[GpuRow], file: Path) -> list[GpuRow]:
    found = []
    for row in rows:
        print(kernels.line(row), flush=True)
        append_csv(file, [asdict(row)])
        found.append(row)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=(*PARTS, SWEEP), action="append", help="part to run; may be repeated")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: torch detects none, so nothing was measured", file=sys.stderr)
        return 1
    wanted = arguments.only or PARTS
    device, begun, wrong, rows = torch.device("cuda"), CLOCK.monotonic(), 0, []
    try:
        session = on_gpu(device, CLOCK, say=lambda text: print(f"  {text}", file=sys.stderr, flush=True))
        if "parity" in wanted:
            wrong = differing_tokens(shape_of(PARITY_SHAPE), device)
            print(f"parity: {wrong} tokens of {PARITY_SHAPE} in float32 are not those of transformers", flush=True)
        if "kernels" in wanted:
            rows += kernels.run(session, (), lambda line: print(line, flush=True), csv_file=arguments.csv)
        if SWEEP in wanted:
            print("\n".join(sweep(session)), flush=True)
        if "weights" in wanted:
            rows += shown(chain(linear_rows(session), steps(session, CodeKind.INT4)), arguments.csv)
        if "steps" in wanted:
            rows += shown(steps(session), arguments.csv)
    except KvferryError as error:
        print(f"bench-gpu: {error.message}", file=sys.stderr)
        return 1
    print("\n".join(verdict.line for verdict in verdicts(rows)))
    print(f"{len(rows)} rows in {CLOCK.monotonic() - begun:.0f} s on {session.about.gpu}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
