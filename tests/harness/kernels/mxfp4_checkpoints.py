"""MXFP4 experts as gpt-oss stores them: blocks of e2m1 values with e8m0 scales, in small random checkpoints.

The writer has its own table of e2m1 values; in the tests, transformers' `convert_moe_packed_tensors` reads the blocks.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from harness.kernels.family_checkpoints import Checkpoint, edit_config

QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round [.., inputs] to (blocks [.., inputs / 32, 16] uint8, scales [.., inputs / 32] uint8)."""
    parts = weight.float().reshape(*weight.shape[:-1], -1, 32)
    exponent = torch.frexp(parts.abs().amax(-1).clamp(min=1e-30) / 6)[1]  # 2^exponent >= max / 6
    nearest = (parts.abs() / torch.exp2(exponent.float())[..., None])[..., None].sub(_VALUES).abs().argmin(-1)
    codes = (nearest + 8 * (parts < 0)).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + 127).to(torch.uint8)


def write_mxfp4(made: Checkpoint, folder: Path) -> Any:
    """Write a gpt-oss checkpoint whose experts are MXFP4; return the transformers model with the same weights, as
    transformers dequantizes them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = made.write(folder)
    path = folder / "model.safetensors"
    tensors, state = load_file(path), model.state_dict()
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = rounded(tensors.pop(name).transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
        # Outputs of transformers' function are [experts, inputs, outputs].
        state[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, path)
    edit_config(folder, quantization_config=QUANTIZATION)
    return model
