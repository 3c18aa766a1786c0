"""Random heads for speculation, written in the layouts of the published checkpoints."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from kvferry.weights.config import ModelConfig

HEADS, KV_HEADS, INNER = 2, 1, 64
Arrays = dict[str, np.ndarray]


def write_eagle(
    folder: Path,
    model: ModelConfig,
    *,
    is_fused: bool,
    seed: int = 0,
    drafted: int | None = None,
    has_bias: bool = False,
    fields: Mapping[str, object] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Write an EAGLE head, or an EAGLE-3 head (`is_fused`), for a model; return the folder.

    Args:
        folder: the folder, which is created.
        model: the target model.
        is_fused: whether the head is of EAGLE-3.
        seed: seed of the weights.
        drafted: EAGLE-3: tokens that the head drafts; default: all.
        has_bias: whether the query, key and value projections have biases.
        fields: further or other fields of config.json.
        tensors: further or other tensors; `None` removes one.
    """
    config = eagle_config(model, is_fused=is_fused, drafted=drafted) | dict(fields or {})
    found = eagle_tensors(model, is_fused=is_fused, seed=seed, drafted=drafted, has_bias=has_bias)
    return _write(folder, "model.safetensors", config, found, tensors)


def eagle_config(model: ModelConfig, *, is_fused: bool, drafted: int | None = None) -> dict[str, object]:
    """Return the fields of config.json of a random head."""
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLMEagle3" if is_fused else "LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
    }
    if is_fused:
        config |= {"draft_vocab_size": drafted or model.vocab_size}
        if model.num_layers < 6:
            config["eagle_aux_hidden_state_layer_ids"] = [0, 1, model.num_layers - 1]
    return config


def eagle_tensors(
    model: ModelConfig, *, is_fused: bool, seed: int = 0, drafted: int | None = None, has_bias: bool = False
) -> Arrays:
    """Return the tensors of a random head by their published names."""
    draw = np.random.default_rng(seed)
    hidden, q, kv = model.hidden_size, HEADS * 16, KV_HEADS * 16
    inputs = 2 * hidden if is_fused else hidden
    layer = "midlayer." if is_fused else "layers.0."

    def matrix(rows: int, cols: int) -> np.ndarray:
        return draw.normal(0.0, 1.5 / np.sqrt(cols), (rows, cols)).astype(np.float32)

    def vector(size: int, mean: float = 1.0) -> np.ndarray:
        return draw.normal(mean, 0.2, size).astype(np.float32)

    found = {
        "fc.weight": matrix(hidden, (3 if is_fused else 2) * hidden),
        f"{layer}self_attn.q_proj.weight": matrix(q, inputs),
        f"{layer}self_attn.k_proj.weight": matrix(kv, inputs),
        f"{layer}self_attn.v_proj.weight": matrix(kv, inputs),
        f"{layer}self_attn.o_proj.weight": matrix(hidden, q),
        f"{layer}mlp.gate_proj.weight": matrix(INNER, hidden),
        f"{layer}mlp.up_proj.weight": matrix(INNER, hidden),
        f"{layer}mlp.down_proj.weight": matrix(hidden, INNER),
        f"{layer}post_attention_layernorm.weight": vector(hidden),
    }
    if has_bias:
        sizes = {"q": q, "k": kv, "v": kv}
        found |= {f"{layer}self_attn.{x}_proj.bias": vector(size, 0.0) for x, size in sizes.items()}
    if not is_fused:
        return found | {"fc.bias": vector(hidden, 0.0)}
    count = drafted or model.vocab_size
    ids = np.sort(draw.permutation(model.vocab_size)[:count])
    found |= {
        f"{layer}input_layernorm.weight": vector(hidden),
        f"{layer}hidden_norm.weight": vector(hidden),
        "norm.weight": vector(hidden),
        "lm_head.weight": matrix(count, hidden),
        "d2t": (ids - np.arange(count)).astype(np.int64),
        "t2d": np.isin(np.arange(model.vocab_size), ids),
    }
    return found


def write_medusa(
    folder: Path,
    model: ModelConfig,
    *,
    heads: int = 3,
    blocks: int = 1,
    seed: int = 0,
    fields: Mapping[str, object] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Write random Medusa heads for a model; return the folder. See `write_eagle`."""
    draw, hidden = np.random.default_rng(seed), model.hidden_size
    found: Arrays = {}
    for head in range(heads):
        for block in range(blocks):
            found[f"{head}.{block}.linear.weight"] = draw.normal(0, 0.2, (hidden, hidden)).astype(np.float32)
            found[f"{head}.{block}.linear.bias"] = draw.normal(0, 0.2, hidden).astype(np.float32)
        found[f"{head}.{blocks}.weight"] = draw.normal(0, 0.3, (model.vocab_size, hidden)).astype(np.float32)
    config: dict[str, object] = {
        "medusa_num_heads": heads,
        "medusa_num_layers": blocks,
        "base_model_name_or_path": model.name,
    }
    return _write(folder, "medusa_lm_head.safetensors", config | dict(fields or {}), found, tensors)


def _write(
    folder: Path,
    name: str,
    config: Mapping[str, object],
    found: Arrays,
    changed: Mapping[str, np.ndarray | None] | None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in (found | dict(changed or {})).items() if value is not None}
    (folder / name).write_bytes(save(kept))
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder
