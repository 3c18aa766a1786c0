"""Reads a PEFT folder as the low-rank updates of a model's linear layers, and computes the digest of its content.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      [rank, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight      [out, rank]

The shapes of all tensors are checked against the model before any value is read, so that a file cannot make this
process allocate more than the model allows.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvferry.core.errors import ModelFileError
from kvferry.weights.adapters.adapter_config import MAX_RANK, AdapterConfig, read_adapter_config
from kvferry.weights.checkpoints.safetensors_dir import read_json
from kvferry.weights.config import ModelConfig
from kvferry.weights.families.registry import FAMILIES
from kvferry.weights.files.regular_file import copy_file
from kvferry.weights.files.row_orders import rotated_first
from kvferry.weights.files.safetensors_file import StoredTensor, open_tensors
from kvferry.weights.tensors import expected_shapes, layer_prefix

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
_MAX_HEADER_BYTES = 8 << 20  # the headers of 4096 layers of 14 tensors are smaller
_MAX_VALUE_BYTES = 4
_NAME = re.compile(
    r"base_model\.model\.(?:model\.language_model|language_model\.model|model)\."
    r"(layers\.(?:0|[1-9][0-9]{0,3})\.(?:self_attn|mlp)\.[a-z_]+)\.lora_([AB])\.weight"
)
_WHY = (
    (
        "lora_embedding_",
        "updates to embeddings are not supported; train without the embedding in target_modules",
    ),
    ("embed_tokens", "replacing embeddings is not supported; train without the embedding in modules_to_save"),
    ("lm_head", "updates to the output head are not supported; train without lm_head in target_modules"),
    ("lora_magnitude_vector", "DoRA is not supported; train with use_dora=False"),
    (
        "experts",
        "updates to experts are not supported; train the projections of attention, or merge the adapter into the model",
    ),
    ("bias", "LoRA biases are not supported; train with bias='none' and lora_bias=False"),
)
_DIGEST_CONTEXT = "kvferry 2026-11 adapter content"
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """Update of one linear layer: y = W x + b (a x)."""

    a: Floats
    """[rank, in]"""
    b: Floats
    """[out, rank], multiplied by the adapter's scale."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The updates of an adapter, with rows in the order of the model's weights in the engine."""

    updates: Mapping[tuple[int, str], LowRank]
    """Updates by layer and linear layer, such as `self_attn.q_proj`."""
    digest: bytes
    """32 bytes; equal for adapters that compute the same updates, regardless of the names of their files."""

    @property
    def rank(self) -> int:
        """The largest rank of an update."""
        return max(len(update.a) for update in self.updates.values())


def read_adapter(folder: Path, config: ModelConfig, *, max_rank: int) -> Adapter:
    """Read and check an adapter.

    Args:
        folder: a folder as PEFT's `save_pretrained` writes it.
        config: configuration of the model that the adapter updates.
        max_rank: largest rank that is accepted.

    Raises:
        ModelFileError: a file is missing or damaged, the adapter does not fit the model or is not plain LoRA; the
            message has the file, the field or tensor, its value and a remedy.
    """
    where = folder / CONFIG_FILE
    settings = read_adapter_config(read_json(where), where)
    path = folder / TENSORS_FILE
    shapes = _module_shapes(config)
    most = 8 + _MAX_HEADER_BYTES + _MAX_VALUE_BYTES * MAX_RANK * sum(map(sum, shapes.values()))
    stored = open_tensors(path, _MAX_HEADER_BYTES, read=partial(copy_file, max_bytes=most))
    found = _pairs(stored, path)
    for module, pair in found.items():
        _check(module, *pair, shapes, settings, max_rank, path)
    digest = blake3(derive_key_context=_DIGEST_CONTEXT)
    updates: dict[tuple[int, str], LowRank] = {}
    for module in sorted(found):
        a, b = (_values(tensor, module, path) for tensor in found[module])
        scaled = b * np.float32(settings.scale_of(module))
        if not np.isfinite(scaled).all():
            raise ModelFileError(
                f"{path}: lora_B of {module} times its scale is not finite; correct lora_alpha", field="lora_alpha"
            )
        label = module.encode()
        digest.update(struct.pack("<III", len(label), *a.shape) + label)
        digest.update(np.ascontiguousarray(a, dtype="<f4").tobytes())
        digest.update(np.ascontiguousarray(scaled, dtype="<f4").tobytes())
        updates |= _split(module, a, scaled, config)
    return Adapter(updates, digest.digest())


def _module_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the shape [out, in] of each linear layer that an adapter of the model may update, by module name."""
    shapes: dict[str, tuple[int, int]] = {}
    for name, shape in expected_shapes(config).items():
        if name.startswith("model.layers.") and name.endswith("_proj.weight"):
            shapes[name.removesuffix(".weight")] = (shape[0], shape[1])
    family = FAMILIES.get(config.architecture)
    if family is None or not family.has_fused_tensors:
        return shapes
    fused: dict[str, tuple[int, int]] = {}
    for layer in range(config.num_layers):
        at = layer_prefix(layer)
        for whole, parts in _FUSED.items():
            sizes = [shapes.pop(at + part) for part in parts]
            fused[at + whole] = (sum(rows for rows, _ in sizes), sizes[0][1])
    return shapes | fused


_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Fused layers of some model families, and the separate layers that the engine has instead."""


def _pairs(stored: Mapping[str, StoredTensor], path: Path) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """Return A and B of each module."""
    halves: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        match = _NAME.fullmatch(name)
        if match is None:
            why = next(
                (why for part, why in _WHY if part in name),
                "only updates to linear layers of attention and the MLP are supported",
            )
            raise ModelFileError(f"{path}: unsupported tensor {name[:120]!r}: {why}", field=name[:120])
        halves.setdefault(f"model.{match[1]}", {})[match[2]] = tensor
    if not halves:
        raise ModelFileError(f"{path} has no tensors; save the adapter again")
    for module, pair in halves.items():
        if len(pair) != 2:
            missing = "B" if "A" in pair else "A"
            raise ModelFileError(
                f"{path}: {module} has no lora_{missing}; save the adapter again", field=f"{module}.lora_{missing}"
            )
    return {module: (pair["A"], pair["B"]) for module, pair in halves.items()}


def _check(
    module: str,
    a: StoredTensor,
    b: StoredTensor,
    shapes: Mapping[str, tuple[int, int]],
    settings: AdapterConfig,
    max_rank: int,
    path: Path,
) -> None:
    if module not in shapes:
        raise ModelFileError(
            f"{path}: the model has no linear layer {module!r}; use an adapter that was trained for this model",
            field=module,
        )
    rank = settings.rank_of(module)
    if rank > max_rank:
        raise ModelFileError(
            f"{path}: {module} has rank {rank}; at most {max_rank} is accepted. Raise max_adapter_rank", field="r"
        )
    rows, cols = shapes[module]
    for half, tensor, expected in (("A", a, (rank, cols)), ("B", b, (rows, rank))):
        if tensor.shape != expected:
            raise ModelFileError(
                f"{path}: {module}.lora_{half} must have shape {list(expected)}, according to the model and the rank "
                f"in adapter_config.json, not {list(tensor.shape)}; use an adapter that was trained for this model",
                field=f"{module}.lora_{half}",
            )


def _values(tensor: StoredTensor, module: str, path: Path) -> Floats:
    values = tensor.values()
    if not np.isfinite(values).all():
        raise ModelFileError(f"{path}: {module} has values that are not finite; save the adapter again", field=module)
    return np.array(values)  # a copy, so that the file's bytes are freed


def _split(module: str, a: Floats, b: Floats, config: ModelConfig) -> dict[tuple[int, str], LowRank]:
    """Return a module's update as updates of the linear layers that the engine has."""
    _, _, number, linear = module.split(".", 3)
    layer = int(number)
    plain = _outputs(config)
    updates: dict[tuple[int, str], LowRank] = {}
    start = 0
    for part in _FUSED.get(linear, (linear,)):
        rows = b[start : start + plain[part]]
        start += plain[part]
        order = rotated_first(config, len(rows)) if part in ("self_attn.q_proj", "self_attn.k_proj") else None
        updates[layer, part] = LowRank(a, rows if order is None else rows[order])
    return updates


def _outputs(config: ModelConfig) -> dict[str, int]:
    """Return the number of outputs of each linear module of a layer."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "self_attn.q_proj": q,
        "self_attn.k_proj": kv,
        "self_attn.v_proj": kv,
        "self_attn.o_proj": config.hidden_size,
        "mlp.gate_proj": config.intermediate_size,
        "mlp.up_proj": config.intermediate_size,
        "mlp.down_proj": config.hidden_size,
    }
