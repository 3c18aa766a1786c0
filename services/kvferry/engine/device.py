"""Where a model computes: the caller's word, or a GPU where torch sees one."""

from importlib.metadata import version
from pathlib import Path

from kvferry.core.errors import UsageError

AUTO, CPU, CUDA = "auto", "cpu", "cuda"
DEVICES = (AUTO, CPU, CUDA)
_COMPILED = "compiled"
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"), Path("/dev/nvmap"))
"""Of NVIDIA's driver, of AMD's, of either inside Windows, and of NVIDIA's small boards."""


def choose_device(wanted: str, *, kernels: str = AUTO) -> str:
    """The device to load a model on, as torch names it.

    Args:
        wanted: a name of `DEVICES`. `auto`: a GPU where torch sees one and the kernels asked for run there.
        kernels: a name of `models.build.KERNELS`; the compiled ones are for CPUs.

    Raises:
        UsageError: the name is not known, or a GPU is asked for and none is here.
    """
    if wanted not in DEVICES:
        raise UsageError(f"no device {wanted!r}; known: {', '.join(DEVICES)}", field="device")
    if wanted == CPU or (wanted == AUTO and kernels.startswith(_COMPILED)):
        return CPU
    if wanted == AUTO:
        return CUDA if sees_gpu() else CPU
    if torch_sees_gpu():
        return CUDA
    raise UsageError(
        "device 'cuda' needs a GPU, and torch sees none here: take --device cpu, or look after the driver and a torch"
        f" that is built for it (this one: {version('torch')})",
        field="device",
    )


def sees_gpu() -> bool:
    """Whether there is a GPU to compute on. Torch is asked only where a driver is: it takes a second to load."""
    return any(driver.exists() for driver in _DRIVERS) and torch_sees_gpu()


def torch_sees_gpu() -> bool:
    """Whether torch finds one."""
    import torch

    return torch.cuda.is_available()
