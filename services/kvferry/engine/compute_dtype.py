"""Which number format the KV has: the caller's word; bfloat16; or, where torch computes, the faster of two.

Torch computes in the format of the KV. Bfloat16 halves the bytes, but whether torch is faster with it depends on the
CPU: with AVX-512 BF16 or AMX it is, without it torch converts each weight on the way and may take longer. So `auto`
measures the model's own largest projections.
"""

import torch

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import UsageError
from kvferry.engine.models.build import level_of, resolve_kernels
from kvferry.kernels.ops import Ops, ops_for
from kvferry.model.config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTO = "auto"

_ROWS = (1, 64)  # a decoding stream, and enough rows for arithmetic to count
_BUDGET_SECONDS = 0.03
"""Per format; both together with packing take about 0.1 s."""
_MAX_OUT = 8192
"""Rows of the probe's matrices: enough that they do not stay in a core's own cache."""


def choose_dtype(
    wanted: str,
    config: ModelConfig,
    *,
    kernels: str = "auto",
    device: torch.device | str = "cpu",
    clock: Clock | None = None,
) -> torch.dtype:
    """The format to run a model in.

    Args:
        wanted: `auto`, or a name of `DTYPES`.
        config: whose shapes are measured for `auto`.
        kernels: what will compute, a name of `models.build.KERNELS`.
        device: where the model runs.
        clock: what to measure with; `None`: the system's.

    Raises:
        UsageError: the name is not known.
    """
    if wanted in DTYPES:
        return DTYPES[wanted]
    if wanted != AUTO:
        raise UsageError(f"no dtype {wanted!r}; known: {', '.join([AUTO, *DTYPES])}", field="dtype")
    if not is_measured(wanted, config, kernels=kernels, device=device):
        return torch.bfloat16
    ops, clock, threads = ops_for(device), clock or SystemClock(), torch.get_num_threads()
    # On one thread: two that meet after each call wait for each other's turn on a busy machine, 8 ms at a time, and
    # then every format seems equally fast. The fastest of many single-threaded passes is hardly disturbed.
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            slow, fast = (_seconds(config, ops, dtype, clock) for dtype in (torch.float32, torch.bfloat16))
    finally:
        torch.set_num_threads(threads)
    return torch.bfloat16 if fast < slow else torch.float32


def is_measured(wanted: str, config: ModelConfig, *, kernels: str = "auto", device: torch.device | str = "cpu") -> bool:
    """Whether the choice needs a measurement: only where torch computes on a CPU. The compiled kernels halve the KV by
    bfloat16 at no cost, and so does a GPU."""
    if wanted != AUTO or torch.device(device).type != "cpu":
        return False
    return not level_of(resolve_kernels(kernels, config, torch.bfloat16, device))


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
