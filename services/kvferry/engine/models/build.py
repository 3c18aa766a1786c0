"""From a model's files to something that computes steps: which kernels, in which form, on how many threads."""

import logging

from kvferry.core.cores import usable_cores
from kvferry.core.dtypes import BFLOAT16, FLOAT32, INT8
from kvferry.core.errors import UsageError
from kvferry.engine.models.compiled import CompiledTransformer
from kvferry.engine.models.model import Model
from kvferry.kernels import compiled
from kvferry.kernels.families import FAMILIES, device_kind, family_for
from kvferry.model.config import ModelConfig
from kvferry.model.tensors import TensorSource

_log = logging.getLogger(__name__)

AUTO, COMPILED = "auto", "compiled"
KERNELS = (
    AUTO,
    COMPILED,
    *(f"{COMPILED}-{level}" for level in ("portable", "avx2", "avx512_bf16", "amx_bf16")),
    *FAMILIES,
)
"""What may be asked for: the best, the best compiled, one level of the compiled, or a family over torch's tensors."""
SHIPPED = "shipped"
WEIGHTS = {SHIPPED: "shipped", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""Names of weights' forms, to what the compiled kernels call them."""
EXACT, FAST = "exact", "fast"
NUMERICS = (EXACT, FAST)
"""How inputs of products are kept: as the KV's type says, or, where weights are codes, rounded to 8 bits."""


def build_model(
    config: ModelConfig,
    tensors: TensorSource,
    *,
    dtype: str,
    weights: str = SHIPPED,
    numerics: str = EXACT,
    device: str = "cpu",
    kernels: str = AUTO,
    threads: int = 0,
) -> Model:
    """Load a model's parameters and make it ready to run.

    Args:
        config: its shape.
        tensors: its weights (`ModelSource.tensors`).
        dtype: of the KV. With float32 no activation is rounded either; int8 needs compiled kernels.
        weights: a name of `WEIGHTS`; torch's families keep them in `dtype`, and take no other.
        numerics: a name of `NUMERICS`; `fast` needs compiled kernels, weights in codes and KV not in float32.
        device: where it runs.
        kernels: a name of `KERNELS`.
        threads: that compute a step; 0: as many as there are cores for this process.

    Raises:
        ModelFileError: the weights do not fit the configuration.
        UsageError: the kernels, the weights' form or the numerics cannot be had here.
    """
    if weights not in WEIGHTS:
        raise UsageError(f"no weights {weights!r}; known: {', '.join(WEIGHTS)}", field="weights")
    if numerics not in NUMERICS:
        raise UsageError(f"no numerics {numerics!r}; known: {', '.join(NUMERICS)}", field="numerics")
    chosen = resolve_kernels(kernels, config, dtype, device)
    level = level_of(chosen)
    if numerics == FAST:
        _check_fast(level, dtype)
    count = threads or usable_cores()
    if level:
        form = WEIGHTS[weights]
        return CompiledTransformer(
            config, tensors, dtype=dtype, form=form, level=level, threads=count, rounds_inputs=numerics == FAST
        )
    if weights != SHIPPED:
        raise UsageError(
            f"weights in {weights} need the compiled kernels; torch keeps them in the type of the KV (--dtype)",
            field="weights",
        )
    if kernels == AUTO and device_kind(device) == "cpu":
        _log.warning("torch computes, several times slower: %s", why_not_compiled(config, dtype, device))
    from kvferry.engine.models.transformer import load_transformer  # loads torch, which takes a second

    return load_transformer(config, tensors, dtype=dtype, device=device, family=chosen, threads=count)


def resolve_kernels(kernels: str, config: ModelConfig, dtype: str, device: str = "cpu") -> str:
    """What `auto` or `compiled` comes to: a level of the compiled kernels, or a family of torch.

    Raises:
        UsageError: there are no such kernels, or they cannot run here.
    """
    if kernels not in KERNELS:
        raise UsageError(f"no kernels {kernels!r}; known: {', '.join(KERNELS)}", field="kernels")
    reason = "other kernels were asked for" if kernels in FAMILIES else why_not_compiled(config, dtype, device)
    if reason and dtype == INT8:
        raise UsageError(f"KV in int8 needs the compiled kernels, and {reason}; take bfloat16 (--dtype)", field="dtype")
    if kernels in FAMILIES:
        return kernels
    if reason is None:
        level = compiled.choose_level(level_of(kernels) or None, rounds_activations=dtype != FLOAT32)
        return f"{COMPILED}-{level}"
    if kernels == AUTO:
        return family_for(device)
    raise UsageError(f"the compiled kernels cannot run here: {reason}", field="kernels")


def _check_fast(level: str, dtype: str) -> None:
    if not level:
        raise UsageError("fast numerics need the compiled kernels; take exact", field="numerics")
    if dtype == FLOAT32:
        raise UsageError(
            f"fast numerics round activations, and {dtype} asks for none rounded (--dtype)", field="numerics"
        )


def level_of(kernels: str) -> str:
    """The level that compiled kernels are named with; empty where none is, or torch computes."""
    family, _, level = kernels.partition("-")
    return level if family == COMPILED else ""


def why_not_compiled(config: ModelConfig, dtype: str, device: str = "cpu") -> str | None:
    """What keeps a model from running on the compiled kernels; `None`: nothing."""
    if device_kind(device) != "cpu":
        return f"they are for CPUs, not for {device} (--device cpu)"
    if not compiled.levels():
        return "they were not built; a C++ compiler at installation builds them"
    if dtype not in (FLOAT32, BFLOAT16, INT8):
        return f"their KV is float32, bfloat16 or int8, not {dtype}"
    if config.head_dim % 16 or config.head_dim > 256:
        return f"heads of {config.head_dim} values are not a multiple of 16 up to 256"
    return None
