"""GPU benchmark session: device, timer, and the device's peak rates."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

import torch

from kvferry.bench.commit import commit
from kvferry.bench.formulas.gpu_work import SERVED, About, Rates, Spec
from kvferry.bench.gpu.timing import CudaTimer, Timer, rates_of
from kvferry.core.clock import Clock
from kvferry.core.errors import UsageError
from kvferry.kernels.gpu.device import INTERPRETED

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Session:
    """The measured device (in tests, Triton's interpreter) with its timer and rates."""

    device: torch.device
    dtype: torch.dtype
    timer: Timer
    rates: Rates
    about: About
    specs: tuple[Spec, ...]
    say: Say
    """Function that is called with messages other than rows."""


def on_gpu(device: torch.device, clock: Clock, *, say: Say) -> Session:
    """Create a session on a GPU and measure its peak rates.

    Args:
        device: the GPU.
        clock: gives the date of the run.
        say: called with messages other than rows.

    Raises:
        UsageError: Triton runs in interpreter mode in this process.
    """
    if INTERPRETED:
        raise UsageError(
            "TRITON_INTERPRET is set, and the speed of interpreted kernels is meaningless; unset it",
            field="device",
        )
    timer = CudaTimer(device)
    rates = rates_of(device, timer)
    about = about_now(torch.cuda.get_device_name(device), clock)
    say(f"{about.gpu}: copy {rates.gbps:.0f} GB/s, matrix product {rates.tflops:.0f} TFLOP/s in bfloat16")
    return Session(device, torch.bfloat16, timer, rates, about, SERVED, say)


def about_now(gpu: str, clock: Clock) -> About:
    """Create the common columns of a run that starts now."""
    date = datetime.fromtimestamp(clock.wall(), UTC).isoformat(timespec="seconds")
    return About(date, commit(), gpu, torch.__version__, version("triton"))
