"""Selection of the model's device: as requested, or a GPU if torch detects one."""

from importlib.metadata import version
from pathlib import Path

from kvferry.core.errors import UsageError
from kvferry.core.process.config import show_one_gpu

AUTO, CPU, CUDA = "auto", "cpu", "cuda"
DEVICES = (AUTO, CPU, CUDA)
_COMPILED = "compiled"
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"), Path("/dev/nvmap"))
"""Device nodes of the GPU drivers of NVIDIA, AMD, WSL and NVIDIA Jetson."""


def choose_device(setting: str, *, kernels: str = AUTO) -> str:
    """Choose the device of a model; return a torch device string.

    Args:
        setting: one of `DEVICES`, or `cuda:N`, the GPU with this index, which is then the only one that this process
            uses. `auto` selects a GPU if torch detects one and the requested kernels run on it.
        kernels: one of `models.build.KERNELS`; compiled kernels run on CPUs only.

    Raises:
        UsageError: `setting` is unknown, or it names a GPU that torch does not detect.
    """
    name, colon, number = setting.partition(":")
    if name not in DEVICES or (colon and not (name == CUDA and number.isdecimal() and len(number) < 4)):
        raise UsageError(f"unknown device {setting!r}; expected one of {', '.join(DEVICES)}, cuda:N", field="device")
    if colon:
        _only(int(number))
        setting = name
    if setting == CPU or (setting == AUTO and kernels.startswith(_COMPILED)):
        return CPU
    if setting == AUTO:
        return CUDA if sees_gpu() else CPU
    if torch_sees_gpu():
        return CUDA
    raise UsageError(
        f"device '{name}{colon}{number}' needs a GPU, but torch detects none: use --device cpu, or check the driver "
        f"and that torch is built for it (installed: {version('torch')})",
        field="device",
    )


def has_driver() -> bool:
    """Return whether this machine has a GPU driver; torch is not imported."""
    return any(driver.exists() for driver in _DRIVERS)


def check_driver(setting: str) -> None:
    """Check that a machine has a GPU driver if a GPU is requested, before processes are started and torch is imported.

    Args:
        setting: see `choose_device`.

    Raises:
        UsageError: there is no driver.
    """
    if setting.partition(":")[0] == CUDA and not has_driver():
        raise UsageError(
            f"device '{setting}' needs a GPU, but this machine has no GPU driver (none of "
            f"{', '.join(map(str, _DRIVERS))} exists): use --device cpu, or install the driver",
            field="device",
        )


def device_title(device: str | object) -> str:
    """Return the readable name of a torch device: `cpu`, or the GPU's product name."""
    if str(device).partition(":")[0] != CUDA:
        return str(device)
    import torch

    return torch.cuda.get_device_name()


def _only(number: int) -> None:
    """Use only the GPU with this index.

    Raises:
        UsageError: this process already uses another GPU.
    """
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        show_one_gpu(number)
    elif number != torch.cuda.current_device():
        raise UsageError(
            f"device 'cuda:{number}' cannot be selected: this process already uses cuda:{torch.cuda.current_device()}. "
            "Use one process per GPU",
            field="device",
        )


def sees_gpu() -> bool:
    """Return whether a GPU is available. Torch, which takes a second to import, is imported only if a GPU driver is
    present."""
    return has_driver() and torch_sees_gpu()


def torch_sees_gpu() -> bool:
    """Return whether torch detects a GPU."""
    import torch

    return torch.cuda.is_available()
