"""Writes checkpoints of transformers as GGUF files with the keys, tensors and values of llama.cpp's converter
(conversion/*.py), under the names of the `gguf` library. The vocabulary is of SentencePiece, with a token per byte."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.numpy import load_file

Weights = dict[str, np.ndarray]
TOKENS = [*(f"<0x{byte:02X}>" for byte in range(256)), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@dataclass(frozen=True)
class Form:
    """How a class of transformers becomes a GGUF file."""

    architecture: gguf.MODEL_ARCH
    is_permuted: bool = False
    norm_offset: float = 0.0
    extra: Callable[[Any], Mapping[str, object]] = field(default=lambda config: {})
    """Returns the keys of the architecture that not all architectures have."""


def _experts(config: Any) -> dict[str, object]:
    count = next(
        value
        for name in ("num_local_experts", "num_experts", "n_routed_experts")
        if (value := getattr(config, name, None)) is not None
    )
    return {"expert_count": count, "expert_used_count": config.num_experts_per_tok}


def _sized_experts(config: Any) -> dict[str, object]:
    return _experts(config) | {"expert_feed_forward_length": config.moe_intermediate_size}


def _gemma(config: Any) -> dict[str, object]:
    caps = {
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    return {"attention.sliding_window": config.sliding_window} | {k: float(v) for k, v in caps.items() if v}


def _granite(config: Any) -> dict[str, object]:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _gpt_oss(config: Any) -> dict[str, object]:
    return _experts(config) | {
        "expert_feed_forward_length": config.intermediate_size,
        "attention.sliding_window": config.sliding_window,
    }


def _deepseek(config: Any) -> dict[str, object]:
    rope = config.rope_parameters
    found = _sized_experts(config) | {
        "vocab_size": config.vocab_size,
        "leading_dense_block_count": config.first_k_dense_replace,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
    }
    if config.q_lora_rank:
        found["attention.q_lora_rank"] = config.q_lora_rank
    if getattr(config, "n_group", None):
        found |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    if getattr(config, "norm_topk_prob", False):
        found["expert_weights_norm"] = True
    if rope.get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return found


def _phi_3(config: Any) -> dict[str, object]:
    rope, size = config.rope_parameters, config.hidden_size // config.num_attention_heads
    found: dict[str, object] = {
        "rope.dimension_count": int(size * rope.get("partial_rotary_factor", 1.0)),
        "rope.scaling.original_context_length": config.original_max_position_embeddings,
        "attention.sliding_window": config.sliding_window or 0,
    }
    if "long_factor" in rope:
        original = config.original_max_position_embeddings
        scale = config.max_position_embeddings / original
        found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    return found


_ARCH = gguf.MODEL_ARCH
FORMS: Mapping[str, Form] = {
    "Llama": Form(_ARCH.LLAMA, is_permuted=True),
    "Mistral": Form(_ARCH.LLAMA, is_permuted=True),
    "Mistral3": Form(_ARCH.MISTRAL3, is_permuted=True),
    "Mixtral": Form(_ARCH.LLAMA, is_permuted=True, extra=_experts),
    "Qwen2": Form(_ARCH.QWEN2),
    "Qwen2VL": Form(_ARCH.QWEN2VL),
    "Qwen2_5_VL": Form(_ARCH.QWEN2VL),
    "Qwen2Moe": Form(
        _ARCH.QWEN2MOE,
        extra=lambda config: (
            _sized_experts(config) | {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size}
        ),
    ),
    "Qwen3": Form(_ARCH.QWEN3),
    "Qwen3VL": Form(_ARCH.QWEN3VL, extra=lambda config: {"n_deepstack_layers": 1}),
    "Qwen3Moe": Form(_ARCH.QWEN3MOE, extra=_sized_experts),
    "Phi3": Form(_ARCH.PHI3, extra=_phi_3),
    "Olmo2": Form(_ARCH.OLMO2),
    "Granite": Form(_ARCH.GRANITE, is_permuted=True, extra=_granite),
    "SmolLM3": Form(_ARCH.SMOLLM3, is_permuted=True),
    "Gemma2": Form(_ARCH.GEMMA2, norm_offset=1.0, extra=_gemma),
    "Gemma3": Form(_ARCH.GEMMA3, norm_offset=1.0, extra=_gemma),
    "GptOss": Form(_ARCH.GPT_OSS, extra=_gpt_oss),
    "DeepseekV2": Form(_ARCH.DEEPSEEK2, extra=_deepseek),
    "DeepseekV3": Form(_ARCH.DEEPSEEK2, extra=_deepseek),
}
"""The forms by the prefix of the class in transformers."""


def write_gguf(
    path: Path, folder: Path, model: Any, prefix: str, kinds: Mapping[str, GGMLQuantizationType] | None = None
) -> Path:
    """Write a checkpoint as a GGUF file.

    Args:
        path: the file to write.
        folder: the checkpoint.
        model: the model in transformers, which has its configuration.
        prefix: prefix of its class, a key of `FORMS`.
        kinds: types of tensors by the end of their name in the file without `.weight`; others are F32.
    """
    form, config = FORMS[prefix], model.config.get_text_config()
    name = gguf.MODEL_ARCH_NAMES[form.architecture]
    writer = GGUFWriter(path, name)
    for key, value in (_pairs(config, form) | dict(form.extra(config))).items():
        if isinstance(value, bool):
            writer.add_bool(f"{name}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{name}.{key}", value)
        elif isinstance(value, str):
            writer.add_string(f"{name}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{name}.{key}", value)
        else:
            writer.add_uint32(f"{name}.{key}", value)  # type: ignore[arg-type]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types([6] * 256 + [3] * 3)
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    for tensor, values in tensors_of(load_file(folder / "model.safetensors"), form, config):
        kind = next((kind for end, kind in (kinds or {}).items() if tensor.endswith(f"{end}.weight")), None)
        if kind is None:
            writer.add_tensor(tensor, np.ascontiguousarray(values, np.float32))
        else:
            writer.add_tensor(tensor, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _pairs(config: Any, form: Form) -> dict[str, object]:
    """Return the keys that all architectures have."""
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    found: dict[str, object] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if form.is_permuted:
        found |= {"vocab_size": config.vocab_size, "rope.dimension_count": size}
    if form.architecture is not _ARCH.GEMMA2:
        found["rope.freq_base"] = float(full["rope_theta"])
    if getattr(config, "head_dim", None) and not hasattr(config, "kv_lora_rank"):
        found |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if "sliding_attention" in rope:
        found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    if "mrope_section" in rope:
        found["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    if full["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": float(full["factor"])}
    if full["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
    return found


def tensors_of(stored: Weights, form: Form, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a GGUF file with their names in it."""
    names = gguf.get_tensor_name_map(form.architecture, config.num_hidden_layers)
    for hf_name, values in _converted(stored, form, config).items():
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        yield name, values
    rope = config.rope_parameters
    for kind in ("long", "short"):
        if f"{kind}_factor" in rope:
            yield f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32)
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _divisors(rope, config.hidden_size // config.num_attention_heads)


def _divisors(rope: Mapping[str, Any], size: int) -> np.ndarray:
    frequencies = rope["rope_theta"] ** -(np.arange(0, size, 2) / size)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    share = np.clip((turns - low) / (high - low), 0, 1)
    divisors: np.ndarray = (1 / ((1 - share) / factor + share)).astype(np.float32)
    return divisors


def _converted(stored: Weights, form: Form, config: Any) -> Weights:
    found: Weights = {}
    experts: dict[str, list[np.ndarray]] = {}
    for given, values in sorted(stored.items(), key=lambda item: _natural(item[0])):
        if any(part in given for part in ("visual", "vision", "multi_modal_projector")):
            continue
        name = given.replace("language_model.model.", "model.").replace("model.language_model.", "model.")
        name = name.replace("language_model.lm_head", "lm_head")
        if name == "lm_head.weight" and getattr(config, "tie_word_embeddings", False):
            continue
        parts = name.split(".")
        if "experts" in parts and parts[parts.index("experts") + 1].isdigit():
            at = parts.index("experts") + 1
            experts.setdefault(".".join([*parts[:at], *parts[at + 1 :]]), []).append(values)
        elif form.is_permuted and name.endswith(("q_proj.weight", "k_proj.weight")):
            found[name] = _permuted(
                values, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            )
        elif "kv_b_proj" in name:
            up = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, of_values = np.split(up, [config.qk_nope_head_dim], axis=1)
            found[name.replace("kv_b_proj", "k_b_proj")] = keys.swapaxes(1, 2)
            found[name.replace("kv_b_proj", "v_b_proj")] = of_values
        elif form.architecture is _ARCH.GPT_OSS and "mlp.experts." in name:
            found |= _gpt_oss_experts(name, values)
        elif name.endswith("sinks"):
            found[f"{name}.weight"] = values
        elif name.endswith("e_score_correction_bias"):
            found[name.replace("correction_bias", "correction.bias")] = values
        else:
            found[name] = values + form.norm_offset if name.endswith("norm.weight") else values
    for name, each in experts.items():
        # Names of Mixtral's experts in the library's table are those of the merged tensors.
        found[name.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
              if "block_sparse_moe" in name else name] = np.stack(each)  # fmt: skip
    return found


def _gpt_oss_experts(name: str, values: np.ndarray) -> Weights:
    room, _, last = name.rpartition(".")
    is_bias = last.endswith("_bias")
    values, suffix = (values, "bias") if is_bias else (values.swapaxes(-1, -2), "weight")
    if last.startswith("down"):
        return {f"{room}.down_proj.{suffix}": values}
    gate, up = (values[:, i::2] for i in range(2))
    return {f"{room}.gate_proj.{suffix}": gate, f"{room}.up_proj.{suffix}": up}


def _permuted(values: np.ndarray, heads: int) -> np.ndarray:
    pairs: np.ndarray = values.reshape(heads, 2, values.shape[0] // heads // 2, -1).swapaxes(1, 2)
    return pairs.reshape(values.shape)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
