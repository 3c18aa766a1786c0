"""Products of 8-bit inputs with 8-bit weights: kvferry's tiles beside torch's dynamically quantized linear.

    python tests/bench/bench_int8.py          both on two threads, in turn; milliseconds, and torch's time by ours

A turn is much longer than the time for which threads of the other library spin after their last product.

Both libraries take float32 inputs, quantize them, and return float32. kvferry has one scale for 32 inputs and one for
32 weights (GGUF's Q8_0); torch has one scale for all inputs and one for all weights.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from kvferry.bench.sampling import alternate
from kvferry.core.clock import SystemClock
from kvferry.core.process.cores import usable_cores
from kvferry.kernels import compiled
from kvferry.model.source import open_model

ROWS = (1, 4, 16, 64, 256, 512)
Q8_0 = 8
TURN_OPERATIONS = 2e10
"""Operations per turn, some tens of milliseconds."""


def torch_linear(inputs: int, outputs: int) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates this package
        plain = torch.nn.Sequential(torch.nn.Linear(inputs, outputs, bias=False))
        return torch.ao.quantization.quantize_dynamic(plain, {torch.nn.Linear}, dtype=torch.qint8)


def repeat(times: int, product: Callable[[], object]) -> None:
    for _ in range(times):
        product()


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="model whose shapes are measured; %(default)s")
    parser.add_argument("--rounds", type=int, default=11)
    given = parser.parse_args()
    module = compiled.extension()
    if module is None:
        print("the compiled kernels were not built", file=sys.stderr)
        return 1
    config, threads, level = open_model(given.model).config, usable_cores(), compiled.levels()[-1]
    torch.set_num_threads(threads)
    pool, rng = compiled.make_pool(threads), np.random.default_rng(0)
    shapes = {
        "gate_up": (config.hidden_size, 2 * config.intermediate_size),
        "down": (config.intermediate_size, config.hidden_size),
        "head": (config.hidden_size, config.vocab_size),
    }
    print(f"{level}, {threads} threads, torch {torch.__version__} ({torch.backends.quantized.engine})")
    for name, (inputs, outputs) in shapes.items():
        matrix = compiled.make_matrix("shipped", [Q8_0], outputs, inputs)
        raw = rng.integers(0, 60, outputs * module.row_bytes(Q8_0, inputs), dtype=np.uint8)
        memory = compiled.Arena(matrix.num_bytes).take(matrix.num_bytes)
        matrix.pack([Q8_0], [raw], np.arange(outputs), memory)
        matrix.attach(memory)
        theirs = torch_linear(inputs, outputs)
        for rows in ROWS:
            x = rng.standard_normal((rows, inputs), dtype=np.float32)
            out = np.empty((rows, outputs), np.float32)
            times = max(4, int(TURN_OPERATIONS / (2.0 * rows * inputs * outputs)))
            found = alternate(
                {
                    "ours": partial(repeat, times, partial(module.product, pool, level, matrix, x, out, True)),
                    "torch": partial(repeat, times, partial(theirs, torch.from_numpy(x))),
                },
                rounds=given.rounds,
                clock=SystemClock(),
            )
            ours, others = (1e3 * found[name].median / times for name in ("ours", "torch"))
            print(f"{name:<8} {rows:>4} x {inputs} x {outputs:<6} {ours:8.3f} {others:8.3f} ms   {others / ours:5.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
