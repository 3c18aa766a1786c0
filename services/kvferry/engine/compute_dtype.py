"""Which number format the KV has: the caller's word; bfloat16; or, where torch computes, the faster of two.

Torch computes in the format of the KV. Bfloat16 halves the bytes, but whether torch is faster with it depends on the
CPU: with AVX-512 BF16 or AMX it is, without it torch converts each weight on the way and may take longer. So `auto`
measures the model's own largest projections.
"""

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.dtypes import BFLOAT16, DTYPES
from kvferry.core.errors import UsageError
from kvferry.engine.models.build import level_of, resolve_kernels
from kvferry.kernels.families import device_kind
from kvferry.model.config import ModelConfig

AUTO = "auto"


def choose_dtype(
    wanted: str,
    config: ModelConfig,
    *,
    kernels: str = "auto",
    device: str = "cpu",
    clock: Clock | None = None,
) -> str:
    """The format to run a model in, a name of `DTYPES`.

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
        return wanted
    if wanted != AUTO:
        raise UsageError(f"no dtype {wanted!r}; known: {', '.join([AUTO, *DTYPES])}", field="dtype")
    if not is_measured(wanted, config, kernels=kernels, device=device):
        return BFLOAT16
    from kvferry.engine.faster_dtype import faster_dtype  # loads torch, which nobody else here needs

    return faster_dtype(config, device=device, clock=clock or SystemClock())


def is_measured(wanted: str, config: ModelConfig, *, kernels: str = "auto", device: str = "cpu") -> bool:
    """Whether the choice needs a measurement: only where torch computes on a CPU. The compiled kernels halve the KV by
    bfloat16 at no cost, and so does a GPU."""
    if wanted != AUTO or device_kind(device) != "cpu":
        return False
    return not level_of(resolve_kernels(kernels, config, BFLOAT16, device))
