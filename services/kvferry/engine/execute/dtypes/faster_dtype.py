"""Measurement of whether torch computes a model's largest projections faster in float32 or in bfloat16."""

import torch

from kvferry.core.clock import Clock
from kvferry.core.dtypes import BFLOAT16, FLOAT32
from kvferry.kernels.ops import Ops, ops_for
from kvferry.weights.config import ModelConfig

_ROWS = (1, 64)  # one decode stream; enough rows to be compute bound
_BUDGET_SECONDS = 0.03
"""Time budget for passes, in seconds per data type; both types, including packing, take about 0.1 s."""
_MAX_OUT = 8192
"""Maximum number of rows of the measured matrices; large enough to exceed a core's cache."""


def faster_dtype(config: ModelConfig, *, device: str, clock: Clock) -> str:
    """Measure which of float32 and bfloat16 is faster; return its name.

    Args:
        config: the model, whose shapes are measured.
        device: device of the model.
        clock: clock of the measurement.
    """
    ops, threads = ops_for(device), torch.get_num_threads()
    # Measured on one thread: on a busy machine, two threads that synchronize after each call wait for each other's time
    # slices of 8 ms, so both types seem equally fast. The fastest of many single-threaded passes is robust.
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            slow, fast = (_seconds(config, ops, dtype, clock) for dtype in (torch.float32, torch.bfloat16))
    finally:
        torch.set_num_threads(threads)
    return BFLOAT16 if fast < slow else FLOAT32


def _seconds(config: ModelConfig, ops: Ops, dtype: torch.dtype, clock: Clock) -> float:
    """Measure a layer's widest projection for one row and for many rows, each as the fastest of several passes; return
    a weighted sum of both times."""
    out = min(max(config.vocab_size, 2 * config.intermediate_size), _MAX_OUT)
    project = ops.pack_linear(torch.zeros(out, config.hidden_size, dtype=dtype), None)
    total = 0.0
    for rows in _ROWS:
        x = torch.zeros(rows, config.hidden_size, dtype=dtype)
        project(x)
        best, end = float("inf"), clock.monotonic() + _BUDGET_SECONDS / len(_ROWS)
        for _ in range(1000):
            start = clock.monotonic()
            project(x)
            now = clock.monotonic()
            best = min(best, now - start)
            if now >= end:
                break
        total += best / rows**0.5  # balances decode and prefill
    return total
