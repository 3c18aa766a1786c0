"""LoRA adapters of random tensors, as peft writes them."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from kvferry.weights.config import ModelConfig
from kvferry.weights.tensors import expected_shapes

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write(
    folder: Path,
    config: ModelConfig,
    *,
    seed: int = 0,
    rank: int = 4,
    linears: tuple[str, ...] = LINEARS,
    spread: float = 0.3,
    fields: Mapping[str, object] | None = None,
) -> Path:
    """Write an adapter of random tensors for a model with separate projections, and return its folder."""
    generator = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in expected_shapes(config).items():
        module = name.removesuffix(".weight")
        if name.startswith("model.layers.") and module.rpartition(".")[2] in linears:
            a = generator.normal(size=(rank, shape[1])) / shape[1] ** 0.5
            b = generator.normal(size=(shape[0], rank)) * spread / rank**0.5
            tensors[f"base_model.model.{module}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"base_model.model.{module}.lora_B.weight"] = b.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    raw = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(linears)} | dict(fields or {})
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    return folder
