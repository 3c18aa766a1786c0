"""Which of two number formats torch computes a model's largest projections faster in, measured now."""

import torch

from kvferry.core.clock import Clock
from kvferry.core.dtypes import BFLOAT16, FLOAT32
from kvferry.kernels.ops import Ops, ops_for
from kvferry.model.config import ModelConfig

_ROWS = (1, 64)  # a decoding stream, and enough rows for arithmetic to count
_BUDGET_SECONDS = 0.03
"""Per format; both together with packing take about 0.1 s."""
_MAX_OUT = 8192
"""Rows of the probe's matrices: enough that they do not stay in a core's own cache."""


def faster_dtype(config: ModelConfig, *, device: str, clock: Clock) -> str:
    """`float32` or `bfloat16`.

    Args:
        config: whose shapes are measured.
        device: where the model runs.
        clock: what to measure with.
    """
    ops, threads = ops_for(device), torch.get_num_threads()
    # On one thread: two that meet after each call wait for each other's turn on a busy machine, 8 ms at a time, and
    # then every format seems equally fast. The fastest of many single-threaded passes is hardly disturbed.
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            slow, fast = (_seconds(config, ops, dtype, clock) for dtype in (torch.float32, torch.bfloat16))
    finally:
        torch.set_num_threads(threads)
    return BFLOAT16 if fast < slow else FLOAT32


def _seconds(config: ModelConfig, ops: Ops, dtype: torch.dtype, clock: Clock) -> float:
    """Time of one row and of many through a layer's widest projection, the fastest of several passes each."""
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
        total += best / rows**0.5  # neither decoding nor prefill decides alone
    return total
