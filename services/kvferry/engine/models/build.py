"""From a model's files to something that computes steps: which kernels, in which form, on how many threads."""

import logging

import torch

from kvferry.core.cores import usable_cores
from kvferry.core.errors import UsageError
from kvferry.engine.models.compiled import CompiledTransformer
from kvferry.engine.models.model import Model
from kvferry.engine.models.transformer import Transformer
from kvferry.engine.models.weights import load_weights
from kvferry.kernels import compiled
from kvferry.kernels.ops import FAMILIES, ops_for
from kvferry.model.config import ModelConfig
from kvferry.model.tensors import TensorSource

_log = logging.getLogger(__name__)

COMPILED = "compiled"
KERNELS = ("auto", COMPILED, *(f"{COMPILED}-{level}" for level in ("portable", "avx2", "avx512_bf16")), *FAMILIES)
"""What may be asked for: the best, the best compiled, one level of the compiled, or a family of torch."""
WEIGHTS = {"shipped": "shipped", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""Names of weights' forms, to what the compiled kernels call them."""


def build_model(
    config: ModelConfig,
    tensors: TensorSource,
    *,
    dtype: torch.dtype,
    weights: str = "shipped",
    device: torch.device | str = "cpu",
    kernels: str = "auto",
    threads: int = 0,
) -> Model:
    """Load a model's parameters and make it ready to run.

    Args:
        config: its shape.
        tensors: its weights (`ModelSource.tensors`).
        dtype: of the KV. With float32 no activation is rounded either.
        weights: a name of `WEIGHTS`; torch's families keep them in `dtype` whatever is said here.
        device: where it runs.
        kernels: a name of `KERNELS`.
        threads: that compute a step; 0: as many as there are cores for this process. Torch has its own setting.

    Raises:
        ModelFileError: the weights do not fit the configuration.
        UsageError: the kernels, or the weights' form, cannot be had here.
    """
    if kernels not in KERNELS:
        raise UsageError(f"no kernels {kernels!r}; known: {', '.join(KERNELS)}", field="kernels")
    if weights not in WEIGHTS:
        raise UsageError(f"no weights {weights!r}; known: {', '.join(WEIGHTS)}", field="weights")
    with torch.inference_mode():
        if kernels.startswith(COMPILED) or computes_compiled(kernels, config, dtype, device):
            reason = why_not_compiled(config, dtype, device)
            if reason is not None:
                raise UsageError(f"the compiled kernels cannot run here: {reason}", field="kernels")
            level = compiled.choose_level(kernels.partition("-")[2] or None, rounds_activations=dtype == torch.bfloat16)
            count = threads or usable_cores()
            return CompiledTransformer(config, tensors, dtype=dtype, form=WEIGHTS[weights], level=level, threads=count)
        if kernels == "auto" and torch.device(device).type == "cpu":
            _log.warning("torch computes, several times slower: %s", why_not_compiled(config, dtype, device))
        ops = ops_for(device, None if kernels == "auto" else kernels)
        loaded = load_weights(config, tensors, ops, dtype=dtype, device=torch.device(device))
        return Transformer(config, loaded, ops, dtype=dtype)


def resolve_kernels(kernels: str, config: ModelConfig, dtype: str) -> str:
    """What `auto` or `compiled` comes to for a type of KV: a level of the compiled kernels, or a family of torch."""
    wanted = {"float32": torch.float32, "float16": torch.float16}.get(dtype, torch.bfloat16)
    if not computes_compiled(kernels, config, wanted):
        return "torch" if kernels == "auto" else kernels
    level = compiled.choose_level(kernels.partition("-")[2] or None, rounds_activations=wanted == torch.bfloat16)
    return f"{COMPILED}-{level}"


def computes_compiled(
    kernels: str, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> bool:
    """Whether `build_model` will take the compiled kernels."""
    if kernels not in KERNELS or not (kernels == "auto" or kernels.startswith(COMPILED)):
        return False
    return why_not_compiled(config, dtype, device) is None


def why_not_compiled(config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> str | None:
    """What keeps a model from running on the compiled kernels; `None`: nothing."""
    if torch.device(device).type != "cpu":
        return f"they are for CPUs, not for {device}"
    if not compiled.levels():
        return "they were not built; a C++ compiler at installation builds them"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"their KV is float32 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    if config.head_dim % 16 or config.head_dim > 256:
        return f"heads of {config.head_dim} values are not a multiple of 16 up to 256"
    return None
