"""Device support of the Triton backend: GPUs, or, for tests, Triton's interpreter on the CPU. Whether kernels are
compiled or interpreted is decided when Triton and this module are imported.
"""

from functools import cache

import torch
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels of this process (`TRITON_INTERPRET=1` was set before importing
Triton)."""
INTERPRETER = "interpreter"


def why_not(device: torch.device) -> str | None:
    """Return the reason why the kernels cannot run on a device; `None` if they can."""
    if device.type == "cuda":
        if not _detects_gpu():
            return "the kernels 'triton' need a GPU, and torch detects none"
        current = torch.cuda.current_device()
        if device.index not in (None, current):  # Triton launches on the current device
            return (
                f"the tensor is on {device}, but the current device is cuda:{current}; call torch.cuda.set_device first"
            )
        return None
    if device.type != "cpu":
        return f"the kernels 'triton' run on CUDA and ROCm devices, not on {device.type}"
    if INTERPRETED:
        return None
    return (
        "the kernels 'triton' need a GPU; the device is the CPU. Use --kernels auto"
        " (for tests, Triton's interpreter: TRITON_INTERPRET=1 in the environment)"
    )


@cache
def _detects_gpu() -> bool:
    """Return whether torch detects a GPU; cached, since each launch checks its device."""
    return torch.cuda.is_available()


@cache
def device_class(device: torch.device) -> str:
    """Return the device key for launch choices: `interpreter`, or the generation of the GPU, for example `sm90`."""
    if INTERPRETED:
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"
