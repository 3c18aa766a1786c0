"""Where a model computes: the caller's word, or a GPU where torch sees one."""

import torch

from kvferry.core.errors import UsageError

AUTO, CPU, CUDA = "auto", "cpu", "cuda"
DEVICES = (AUTO, CPU, CUDA)
_COMPILED = "compiled"


def choose_device(wanted: str, *, kernels: str = AUTO) -> torch.device:
    """The device to load a model on.

    Args:
        wanted: a name of `DEVICES`. `auto`: a GPU where torch sees one and the kernels asked for run there.
        kernels: a name of `models.build.KERNELS`; the compiled ones are for CPUs.

    Raises:
        UsageError: the name is not known, or a GPU is asked for and none is here.
    """
    if wanted not in DEVICES:
        raise UsageError(f"no device {wanted!r}; known: {', '.join(DEVICES)}", field="device")
    if wanted == CPU or (wanted == AUTO and kernels.startswith(_COMPILED)):
        return torch.device(CPU)
    if torch.cuda.is_available():
        return torch.device(CUDA)
    if wanted == AUTO:
        return torch.device(CPU)
    raise UsageError(
        "device 'cuda' needs a GPU, and torch sees none here: take --device cpu, or look after the driver and a torch"
        f" that is built for it (this one: {torch.__version__})",
        field="device",
    )
