"""Where Triton's kernels run: a GPU, or Triton's interpreter on the CPU, which is for tests.

Triton decides when a kernel is imported whether it is compiled or interpreted, so this does too.
"""

from functools import cache

import torch
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether the interpreter runs the kernels of this process; `TRITON_INTERPRET=1` before Triton's import says so."""
INTERPRETER = "interpreter"


def why_not(device: torch.device) -> str | None:
    """What keeps the kernels from running on a device; `None`: nothing."""
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return "the kernels 'triton' need a GPU, and torch sees none here"
        current = torch.cuda.current_device()
        if device.index not in (None, current):  # Triton would launch on the other one
            return f"it is on {device}, and cuda:{current} is the current device; call torch.cuda.set_device first"
        return None
    if device.type != "cpu":
        return f"the kernels 'triton' run on CUDA and ROCm devices, not on {device.type}"
    if INTERPRETED:
        return None
    return (
        "the kernels 'triton' need a GPU; the device is the CPU. Take --kernels auto"
        " (for tests, Triton's interpreter: TRITON_INTERPRET=1 in the environment)"
    )


@cache
def device_class(device: torch.device) -> str:
    """What launch choices go by: `interpreter`, or the generation of the GPU, for example `sm90`."""
    if INTERPRETED:
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"
