"""Where a GPU's kernels are measured and with what; the device's own bounds are measured first."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

import torch

from kvferry.bench.commit import commit
from kvferry.bench.gpu.timing import CudaTimer, Timer, rates_of
from kvferry.bench.gpu.work import SERVED, About, Rates, Spec
from kvferry.core.clock import Clock
from kvferry.core.errors import UsageError
from kvferry.kernels.gpu.device import INTERPRETED

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Session:
    """One device, ready to be measured; in tests it is Triton's interpreter."""

    device: torch.device
    dtype: torch.dtype
    timer: Timer
    rates: Rates
    about: About
    specs: tuple[Spec, ...]
    say: Say
    """Told of what is no row."""


def on_gpu(device: torch.device, clock: Clock, *, say: Say) -> Session:
    """A session on a real GPU.

    Raises:
        UsageError: Triton interprets in this process.
    """
    if INTERPRETED:
        raise UsageError(
            "TRITON_INTERPRET is set, and interpreted kernels have no speed; take it out of the environment",
            field="device",
        )
    timer = CudaTimer(device)
    rates = rates_of(device, timer)
    about = about_now(torch.cuda.get_device_name(device), clock)
    say(f"{about.gpu}: copies {rates.gbps:.0f} GB/s, multiplies {rates.tflops:.0f} TFLOP/s in bfloat16")
    return Session(device, torch.bfloat16, timer, rates, about, SERVED, say)


def about_now(gpu: str, clock: Clock) -> About:
    """What the rows of a run that begins now have in common."""
    date = datetime.fromtimestamp(clock.wall(), UTC).isoformat(timespec="seconds")
    return About(date, commit(), gpu, torch.__version__, version("triton"))
