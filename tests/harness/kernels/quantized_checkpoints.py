"""Quantized checkpoints of small models, as the formats store them, with the model that has the dequantized weights.

tests/golden/quantized has modules that the formats' own libraries wrote, against which the reader is tested; these
writers are tested through the reader.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from harness.kernels.family_checkpoints import Checkpoint, edit_config

Tensors = dict[str, torch.Tensor]
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_INT = torch.int32


@dataclass(frozen=True)
class Form:
    """A quantized format: its `quantization_config`, and the function that quantizes a weight [outputs, inputs]."""

    config: dict[str, object]
    quantize: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
    """Returns the tensors of the module by the last part of their names, and the dequantized weight."""
    is_exact: bool = True
    """Whether the compiled kernels keep the values exactly."""


def pack(codes: npt.NDArray[np.integer[Any]], bits: int = 4, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack codes along the last axis, lowest bits first."""
    count = 32 // bits
    parts = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, count)
    words = np.zeros(parts.shape[:-1], np.uint32)
    for place in range(count):
        words |= parts[..., order[place] if order else place] << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32).copy())


@dataclass(frozen=True)
class Rounded:
    """A weight rounded to codes in groups."""

    codes: npt.NDArray[np.int64]
    """[outputs, inputs]"""
    scales: torch.Tensor
    """[outputs, groups], float16"""
    zeros: npt.NDArray[np.int64]
    """[outputs, groups]"""
    values: torch.Tensor = field(repr=False)


def rounded(weight: torch.Tensor, group: int, *, symmetric: bool, bits: int = 4) -> Rounded:
    """Round a weight to the nearest codes."""
    top = (1 << bits) - 1
    parts = weight.reshape(len(weight), -1, group)
    if symmetric:
        scales = (parts.abs().amax(-1) * 2 / top).half()
        zeros = torch.full(scales.shape, (top + 1) // 2)
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scales = ((high - low) / top).half()
        zeros = (-low / scales.float()).round().clamp(0, top)
    scale, zero = scales.float()[..., None], zeros.float()[..., None]
    codes = (parts / scale + zero).round().clamp(0, top)
    values = (scale * (codes - zero)).reshape(weight.shape)
    return Rounded(codes.reshape(weight.shape).long().numpy(), scales, zeros.long().numpy(), values)


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    found = rounded(weight, GROUP, symmetric=False)
    tensors = {
        "qweight": pack(found.codes.T, order=AWQ_ORDER),
        "qzeros": pack(found.zeros.T, order=AWQ_ORDER),
        "scales": found.scales.T.contiguous(),
    }
    return tensors, found.values


def _gptq(weight: torch.Tensor, *, reorders: bool = False, symmetric: bool = True) -> tuple[Tensors, torch.Tensor]:
    inputs = weight.shape[1]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(1)) if reorders else torch.arange(inputs)
    found = rounded(weight[:, order], GROUP, symmetric=symmetric)
    back = torch.argsort(order)
    words = pack((found.zeros.T - 1) & 15)
    tensors = {
        "qweight": pack(found.codes[:, back].T.reshape(-1, 8, len(weight)).swapaxes(1, 2)).reshape(-1, len(weight)),
        "qzeros": words,
        "scales": found.scales.T.contiguous(),
        "g_idx": (back // GROUP).to(_INT),
        "bias": torch.zeros(len(weight)),
    }
    return tensors, found.values[:, back]


def _packed(weight: torch.Tensor, *, symmetric: bool, group: int | None) -> tuple[Tensors, torch.Tensor]:
    found = rounded(weight, group or weight.shape[1], symmetric=symmetric)
    tensors = {
        "weight_packed": pack(found.codes),
        "weight_scale": found.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack(found.zeros.T).T.contiguous()
    return tensors, found.values


def _int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = (weight.abs().amax(-1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.float()


def _float8(weight: torch.Tensor, *, block: tuple[int, int], name: str) -> tuple[Tensors, torch.Tensor]:
    scales = torch.ones(-(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1]))
    codes, values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            values[at] = codes[at].float() * scales[i, j]
    return {"weight": codes, name: scales}, values


def group_config(form: str, weights: dict[str, object], **more: object) -> dict[str, object]:
    """Return a `quantization_config` of compressed-tensors with one group of all linear modules."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None} | more
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*layers\\.1\\.mlp\\.down_proj$"],
        "config_groups": {"group_0": group},
    }


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
_W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
_W8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
_F8 = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [48, 32], "symmetric": True}
_EXCEPT = ["lm_head", "layers.1.mlp.down_proj"]
FORMS = {
    "awq": Form(_AWQ | {"modules_to_not_convert": _EXCEPT}, _awq),
    "gptq": Form(_GPTQ, _gptq),
    "gptq-asymmetric": Form(_GPTQ | {"sym": False}, lambda w: _gptq(w, symmetric=False)),
    "gptq-desc-act": Form(_GPTQ | {"desc_act": True}, lambda w: _gptq(w, reorders=True), is_exact=False),
    "packed": Form(group_config("pack-quantized", _W4), lambda w: _packed(w, symmetric=True, group=GROUP)),
    "packed-channel-asymmetric": Form(
        group_config("pack-quantized", _W4 | {"strategy": "channel", "group_size": None, "symmetric": False}),
        lambda w: _packed(w, symmetric=False, group=None),
    ),
    "int8": Form(group_config("int-quantized", _W8, input_activations={"num_bits": 8, "dynamic": True}), _int8),
    "float-block": Form(
        group_config("float-quantized", _F8),
        lambda w: _float8(w, block=(48, 32), name="weight_scale"),
        is_exact=False,
    ),
    "fp8": Form(
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [48, 32],
            "modules_to_not_convert": _EXCEPT,
        },
        lambda w: _float8(w, block=(48, 32), name="weight_scale_inv"),
        is_exact=False,
    ),
}
"""The formats by name."""


def is_quantized(name: str) -> bool:
    """Return whether a tensor of a checkpoint is quantized: all projections of its text part but one."""
    return "layers." in name and name.endswith("_proj.weight") and "layers.1.mlp.down_proj" not in name


def quantize_folder(form: Form, folder: Path) -> dict[str, torch.Tensor]:
    """Quantize the projections of a checkpoint in place; return their dequantized weights by name."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    values: dict[str, torch.Tensor] = {}
    for name in [name for name in tensors if is_quantized(name)]:
        parts, values[name] = form.quantize(tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, path)
    edit_config(folder, quantization_config=json.loads(json.dumps(form.config)))
    return values


def write_quantized(form: Form, made: Checkpoint, folder: Path) -> Any:
    """Write a checkpoint in a format; return the transformers model with the dequantized weights."""
    model = made.write(folder)
    state = model.state_dict()
    for name, values in quantize_folder(form, folder).items():
        state[name].copy_(values)
    return model
