"""LoRA adapters trained a few steps by peft on a transformers model."""

import warnings
from pathlib import Path
from typing import Any

import peft
import torch

from harness.kernels.lora_files import LINEARS

FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_STEPS = 4
_ROWS, _LENGTH = 2, 24


def train(model: Any, folder: Path, *, seed: int = 0, scale: float = 1.0, **settings: Any) -> Any:
    """Train an adapter on random tokens, save it, and return the model with the adapter; the weights of `model` are
    not changed.

    Args:
        model: a transformers model in float32.
        folder: folder of the adapter.
        seed: seed of the adapter and its data.
        scale: factor of the trained B, so that a few steps change the tokens.
        settings: fields of `peft.LoraConfig`.
    """
    torch.manual_seed(seed)
    fused = any("qkv_proj" in name for name, _ in model.named_modules())
    defaults: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": list(FUSED if fused else LINEARS)}
    config = peft.LoraConfig(**(defaults | settings))
    with warnings.catch_warnings():  # peft reads an attribute that transformers deprecates
        warnings.simplefilter("ignore", FutureWarning)
        adapted = peft.get_peft_model(model, config)
    weights = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=0.05)
    adapted.train()
    for _ in range(_STEPS):
        tokens = torch.randint(0, 250, (_ROWS, _LENGTH))
        loss = adapted(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "lora_B" in name:
                value.mul_(scale)
    adapted.eval()
    adapted.save_pretrained(str(folder))
    return adapted
