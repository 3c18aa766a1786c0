"""Selection of the KV's data type: as requested, bfloat16, or, with torch on a CPU, whichever type is measured to be
faster.

Torch computes in the data type of the KV. Bfloat16 halves the bytes, but whether torch is faster with it depends on the
CPU: it is with AVX-512 BF16 or AMX; otherwise torch converts each weight during the matrix product and may be slower.
Therefore `auto` measures the model's largest projections.
"""

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.dtypes import BFLOAT16, DTYPES
from kvferry.core.errors import UsageError
from kvferry.engine.execute.models.build import level_of, resolve_kernels
from kvferry.kernels.backends import device_kind
from kvferry.weights.config import ModelConfig

AUTO = "auto"


def choose_dtype(
    setting: str,
    config: ModelConfig,
    *,
    kernels: str = "auto",
    device: str = "cpu",
    clock: Clock | None = None,
) -> str:
    """Choose the data type of a model's KV; return one of `DTYPES`.

    Args:
        setting: `auto`, or one of `DTYPES`.
        config: the model, whose shapes are measured for `auto`.
        kernels: one of `models.build.KERNELS`.
        device: device of the model.
        clock: clock of the measurement; default: the system's clock.

    Raises:
        UsageError: `setting` is unknown.
    """
    if setting in DTYPES:
        return setting
    if setting != AUTO:
        raise UsageError(f"unknown dtype {setting!r}; expected one of {', '.join([AUTO, *DTYPES])}", field="dtype")
    if not is_measured(setting, config, kernels=kernels, device=device):
        return BFLOAT16
    from kvferry.engine.execute.dtypes.faster_dtype import (
        faster_dtype,  # imports torch; the other choices do not need it
    )

    return faster_dtype(config, device=device, clock=clock or SystemClock())


def is_measured(setting: str, config: ModelConfig, *, kernels: str = "auto", device: str = "cpu") -> bool:
    """Return whether the choice needs a measurement, which is so with torch on a CPU. With the compiled kernels
    and on GPUs, bfloat16 has no conversion cost.

    Args:
        setting: value of the setting `dtype`.
        config: configuration of the model.
        kernels: value of the setting `kernels`.
        device: torch device string.
    """
    if setting != AUTO or device_kind(device) != "cpu":
        return False
    return not level_of(resolve_kernels(kernels, config, BFLOAT16, device))
