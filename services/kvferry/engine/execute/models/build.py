"""Model construction from tensors: selection of kernels, weight format, numerics and threads."""

import logging

from kvferry.core.dtypes import BFLOAT16, CODED, FLOAT32
from kvferry.core.errors import UsageError
from kvferry.core.process.cores import usable_cores
from kvferry.core.settings.engine import AUTO, COMPILED, EXACT, FAST, SHIPPED
from kvferry.engine.execute.models.compiled import CompiledTransformer
from kvferry.engine.execute.models.model import Model
from kvferry.kernels import compiled
from kvferry.kernels.backends import BACKENDS, backend_for, device_kind
from kvferry.kernels.latent_limits import LATENT_LIMITS
from kvferry.weights.config import Latent, ModelConfig
from kvferry.weights.features import features_in_use
from kvferry.weights.tensors import TensorSource

_log = logging.getLogger(__name__)

_TRITON = "triton"
COMPILED_FEATURES = frozenset(
    {
        "rope_scaling", "rotary_dim", "local_rope_theta", "unrotated_layers", "windows", "attention_scale",
        "attention_soft_cap", "logit_soft_cap", "embedding_scale", "residual_scale", "logit_scale", "norm_placement",
        "norm_offset", "qk_norm_spans_heads", "activation", "swiglu_alpha", "swiglu_limit", "attention_sinks",
        "output_bias", "experts", "latent",
    }
)  # fmt: skip
"""Features of `ModelConfig` that the compiled kernels implement."""
_MAX_RANK, _MAX_WIDTH = 512, 640
"""Maximum number of values of a latent vector in the compiled kernels, without and with the rotated ones."""
WEIGHTS = {SHIPPED: "shipped", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""Weight formats, each with its name in the compiled kernels."""


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
    """Load a model's parameters into a runnable model.

    Args:
        config: the model's shape.
        tensors: the model's weights (`ModelSource.tensors`).
        dtype: data type of the KV. With float32, activations are not rounded either; int8 and fp8 need the
            compiled or the Triton kernels.
        weights: key of `WEIGHTS`; torch backends keep weights in `dtype` and support no other format.
        numerics: `exact`, or `fast`: inputs of products are rounded to 8 bits; `fast` needs compiled kernels,
            quantized weights, and KV in a dtype other than float32.
        device: device of the model, as a torch device string.
        kernels: see `EngineSettings.kernels`.
        threads: number of compute threads; 0: the number of cores available to this process.

    Raises:
        ModelFileError: the weights do not match the configuration.
        UsageError: this machine does not support the kernels, weight format or numerics.
    """
    chosen = resolve_kernels(kernels, config, dtype, device)
    level = level_of(chosen)
    if numerics == FAST:
        check_fast(level, dtype)
    for line in tensors.weights():
        _log.debug("weights: %s", line)
    count = threads or usable_cores()
    if level:
        form = WEIGHTS[weights]
        return CompiledTransformer(
            config, tensors, dtype=dtype, form=form, level=level, threads=count, rounds_inputs=numerics == FAST
        )
    if weights != SHIPPED:
        raise UsageError(
            f"weights in {weights} need the compiled kernels; the torch kernels keep weights in the type of the KV "
            "(--dtype)",
            field="weights",
        )
    if kernels == AUTO and device_kind(device) == "cpu":
        _log.warning("falling back to torch kernels, several times slower: %s", why_not_compiled(config, dtype, device))
    from kvferry.engine.execute.models.transformer import load_transformer  # importing torch takes a second

    return load_transformer(config, tensors, dtype=dtype, device=device, backend=chosen, threads=count)


def resolve_kernels(kernels: str, config: ModelConfig, dtype: str, device: str = "cpu") -> str:
    """Resolve `auto` or `compiled` to a level of the compiled kernels or a torch backend.

    Args:
        kernels: see `EngineSettings.kernels`.
        config: configuration of the model.
        dtype: data type of the KV.
        device: torch device string.

    Raises:
        UsageError: the name is unknown, or the kernels cannot run on this machine.
    """
    reason = "other kernels were requested" if kernels in BACKENDS else why_not_compiled(config, dtype, device)
    if config.latent is not None and (device_kind(device) != "cpu" or kernels == _TRITON):
        _check_latent_of_triton(kernels, config.latent, config.architecture)
    if reason and dtype in CODED:
        _check_coded(kernels, config, dtype, device, reason)
    if kernels in BACKENDS:
        return kernels
    if reason is None:
        level = compiled.choose_level(level_of(kernels) or None, rounds_activations=dtype != FLOAT32)
        return f"{COMPILED}-{level}"
    if kernels == AUTO:
        return backend_for(device)
    raise UsageError(f"the compiled kernels cannot run here: {reason}", field="kernels")


def _check_coded(kernels: str, config: ModelConfig, dtype: str, device: str, reason: str) -> None:
    """Check that a torch backend supports KV in 8 bits.

    Raises:
        UsageError: it does not; `reason` is why the compiled kernels cannot run, as a clause about them.
    """
    if config.latent is not None:
        raise UsageError(
            f"latent vectors of the model family {config.architecture} are kept in float32, float16 or bfloat16, not "
            f"{dtype}; use --dtype bfloat16",
            field="dtype",
        )
    chosen = kernels if kernels in BACKENDS else backend_for(device)
    if chosen != _TRITON:
        raise UsageError(
            f"{dtype} KV needs the compiled kernels, but {reason}, or the Triton kernels; use --dtype bfloat16",
            field="dtype",
        )


def check_fast(level: str, dtype: str) -> None:
    """Check that `fast` numerics are possible.

    Args:
        level: level of the compiled kernels; empty for other kernels.
        dtype: data type of the KV.

    Raises:
        UsageError: the kernels or the data type do not allow inputs rounded to 8 bits.
    """
    if not level:
        raise UsageError("numerics=fast needs the compiled kernels; use exact", field="numerics")
    if dtype == FLOAT32:
        raise UsageError(
            f"numerics=fast rounds activations, which dtype={dtype} does not allow; use another --dtype",
            field="numerics",
        )


def level_of(kernels: str) -> str:
    """Return the level of compiled kernels, such as "avx2" in "compiled-avx2"; empty for names without a level."""
    backend, _, level = kernels.partition("-")
    return level if backend == COMPILED else ""


def why_not_compiled(config: ModelConfig, dtype: str, device: str = "cpu") -> str | None:
    """Return the reason why a model cannot run on the compiled kernels, as a clause about the kernels; `None` if it
    can.

    Args:
        config: configuration of the model.
        dtype: data type of the KV, one of the engine's settings.
        device: torch device name.
    """
    if device_kind(device) != "cpu":
        return f"they are for CPUs, not for {device} (--device cpu)"
    if not compiled.levels():
        return "they were not built; install a C++ compiler and reinstall kvferry"
    if dtype not in (FLOAT32, BFLOAT16, *CODED):
        return f"their KV is float32, bfloat16, int8 or fp8, not {dtype}"
    lacking = [name for name in features_in_use(config) if name not in COMPILED_FEATURES]
    if lacking:
        return f"they do not implement {', '.join(lacking)} of the model family {config.architecture}"
    if config.latent is not None:
        return _why_not_latent(config.latent, dtype)
    if config.head_dim % 16 or config.head_dim > 256:
        return f"head_dim {config.head_dim} is not a multiple of 16 up to 256"
    return None


def _check_latent_of_triton(kernels: str, latent: Latent, family: str) -> None:
    """Check that the Triton backend supports a model's latent attention.

    Raises:
        UsageError: another torch backend is requested, or the latent vectors are too large for the kernels.
    """
    if kernels in BACKENDS and kernels != _TRITON:
        raise UsageError(
            f"latent attention of the model family {family} on a GPU needs the Triton kernels, not {kernels!r}; use "
            "--kernels auto",
            field="kernels",
        )
    rank, rotated = LATENT_LIMITS
    if latent.rank > rank or latent.rotated > rotated or latent.width % 2:
        raise UsageError(
            f"the Triton kernels support latent vectors of at most {rank} and {rotated} rotated values, in total an "
            f"even number; the model has {latent.rank} (kv_lora_rank) and {latent.rotated} (qk_rope_head_dim); use "
            "--device cpu and --kernels auto",
            field="kernels",
        )


def _why_not_latent(latent: Latent, dtype: str) -> str | None:
    if dtype in CODED:
        return "they keep latent vectors in float32 or bfloat16"
    if latent.rank % 32 or latent.plain % 32 or latent.rank > _MAX_RANK or latent.width > _MAX_WIDTH:
        return (
            f"latent vectors of {latent.rank} and queries of {latent.plain} values are not multiples of 32, or vectors"
            f" have more than {_MAX_RANK} values, or {_MAX_WIDTH} with the rotated ones"
        )
    if latent.rotated % 16 or latent.value % 16 or (latent.query_rank or 0) % 16 or latent.plain + latent.rotated > 256:
        return (
            f"heads of {latent.plain} and {latent.rotated} rotated values, and values of {latent.value}, are not"
            " multiples of 16, or heads have more than 256"
        )
    return None
