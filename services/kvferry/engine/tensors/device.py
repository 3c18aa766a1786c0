"""Selection of the model's device: as requested, or a GPU if torch detects one."""

from importlib.metadata import version
from pathlib import Path

from kvferry.core.errors import UsageError

AUTO, CPU, CUDA = "auto", "cpu", "cuda"
DEVICES = (AUTO, CPU, CUDA)
_COMPILED = "compiled"
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"), Path("/dev/nvmap"))
"""Device nodes of the GPU drivers of NVIDIA, AMD, WSL and NVIDIA Jetson."""


def choose_device(wanted: str, *, kernels: str = AUTO) -> str:
    """Choose the device of a model; return a torch device string.

    Args:
        wanted: one of `DEVICES`. `auto` selects a GPU if torch detects one and the requested kernels run on it.
        kernels: one of `models.build.KERNELS`; compiled kernels run on CPUs only.

    Raises:
        UsageError: `wanted` is unknown, or it is `cuda` and torch detects no GPU.
    """
    if wanted not in DEVICES:
        raise UsageError(f"unknown device {wanted!r}; expected one of {', '.join(DEVICES)}", field="device")
    if wanted == CPU or (wanted == AUTO and kernels.startswith(_COMPILED)):
        return CPU
    if wanted == AUTO:
        return CUDA if sees_gpu() else CPU
    if torch_sees_gpu():
        return CUDA
    raise UsageError(
        "device 'cuda' needs a GPU, and torch detects none: use --device cpu, or check the driver and that torch"
        f" is built for it (installed: {version('torch')})",
        field="device",
    )


def sees_gpu() -> bool:
    """Return whether a GPU is available. Torch, which takes a second to import, is imported only if a GPU driver is
    present."""
    return any(driver.exists() for driver in _DRIVERS) and torch_sees_gpu()


def torch_sees_gpu() -> bool:
    """Return whether torch detects a GPU."""
    import torch

    return torch.cuda.is_available()
