"""Mixtures of experts with random weights, in the form that each engine reads; equal values in all forms of a class.

folder    config.json and bfloat16 safetensors in the layout of Hugging Face
f16, bf16 a GGUF with every matrix in that type
packed    a compressed-tensors folder: projections and experts in 4 bits, a float16 scale per 32 inputs
q4_0      a GGUF with the same 4-bit values and scales in Q4_0

Router, embedding, output head and DeepSeek's `kv_b_proj` have 16 bits in all forms (the router 32 in GGUF, as llama.cpp
writes it). llama.cpp takes DeepSeek models without a compressed query for V2-Lite only if they have 27 layers, so that
the shape here compresses queries.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from harness.kernels.quantized_checkpoints import GROUP, group_config, pack, rounded
from safetensors.torch import save_file

from kvferry.model import tiny

VOCABULARY = 8192
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 2048,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 257,
    "eos_token_id": 258,
    "torch_dtype": "bfloat16",
}
QWEN3_MOE: dict[str, Any] = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "use_sliding_window": False,
}
"""Qwen3-30B-A3B with 4 of 48 layers and 32 of 128 experts."""
DEEPSEEK_V2: dict[str, Any] = _COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 32,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
}
"""DeepSeek-V2-Lite with 3 of 27 layers, 32 of 64 experts, and compressed queries."""
SHAPES: Mapping[str, dict[str, Any]] = {"qwen3_moe": QWEN3_MOE, "deepseek_v2": DEEPSEEK_V2}

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate": "ffn_gate_inp",
} | {
    f"mlp.{where}{way}_proj": f"ffn_{way}{suffix}"
    for where, suffix in (("", ""), ("shared_experts.", "_shexp"), ("experts.", "_exps"))
    for way in ("gate", "up", "down")
}
_PLAIN = ("mlp.gate", "kv_b_proj", "lm_head", "embed_tokens")


@dataclass(frozen=True, slots=True)
class Module:
    """A matrix [outputs, inputs], or the vector of a norm; `experts` of them if it belongs to the routed experts."""

    name: str
    shape: tuple[int, ...]
    experts: int = 0

    @property
    def is_norm(self) -> bool:
        """Whether it is the vector of a norm."""
        return len(self.shape) == 1

    @property
    def is_quantized(self) -> bool:
        """Whether the 4-bit forms have it in 4 bits."""
        return not self.is_norm and not self.name.endswith(_PLAIN)

    def name_of(self, expert: int) -> str:
        """Return the name of an expert's module."""
        return self.name.replace("experts.", f"experts.{expert}.") if self.experts else self.name

    def value(self, expert: int = 0) -> torch.Tensor:
        """Return the values as bfloat16; they depend on the name only."""
        if self.is_norm:
            return torch.ones(self.shape, dtype=torch.bfloat16)
        seed = torch.Generator().manual_seed(zlib.crc32(self.name_of(expert).encode()))
        return torch.empty(self.shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=seed)


def modules(config: Mapping[str, Any]) -> Iterator[Module]:
    """Return all modules of a model."""
    c, hidden = config, config["hidden_size"]
    yield Module("model.embed_tokens", (c["vocab_size"], hidden))
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield Module(at + "input_layernorm", (hidden,))
        yield Module(at + "post_attention_layernorm", (hidden,))
        for name, *shape in _attention(c):
            yield Module(f"{at}self_attn.{name}", tuple(shape))
        if layer < c.get("first_k_dense_replace", 0):
            yield from _mlp(at + "mlp.", hidden, c["intermediate_size"])
            continue
        count = c.get("num_experts") or c["n_routed_experts"]
        yield Module(at + "mlp.gate", (count, hidden))
        yield from _mlp(at + "mlp.experts.", hidden, c["moe_intermediate_size"], count)
        if c.get("n_shared_experts"):
            size = c["moe_intermediate_size"] * c["n_shared_experts"]
            yield from _mlp(at + "mlp.shared_experts.", hidden, size)
    yield Module("model.norm", (hidden,))
    yield Module("lm_head", (c["vocab_size"], hidden))


def _attention(c: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    if "kv_lora_rank" not in c:
        size, kv = c["head_dim"], c["num_key_value_heads"]
        return [
            ("q_proj", heads * size, hidden),
            ("k_proj", kv * size, hidden),
            ("v_proj", kv * size, hidden),
            ("o_proj", hidden, heads * size),
            ("q_norm", size),
            ("k_norm", size),
        ]
    plain, rotated, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    return [
        ("q_a_proj", c["q_lora_rank"], hidden),
        ("q_a_layernorm", c["q_lora_rank"]),
        ("q_b_proj", heads * (plain + rotated), c["q_lora_rank"]),
        ("kv_a_proj_with_mqa", c["kv_lora_rank"] + rotated, hidden),
        ("kv_a_layernorm", c["kv_lora_rank"]),
        ("kv_b_proj", heads * (plain + value), c["kv_lora_rank"]),
        ("o_proj", hidden, heads * value),
    ]


def _mlp(at: str, hidden: int, inner: int, experts: int = 0) -> Iterator[Module]:
    for way in ("gate", "up"):
        yield Module(f"{at}{way}_proj", (inner, hidden), experts)
    yield Module(f"{at}down_proj", (hidden, inner), experts)


def step_bytes(config: Mapping[str, Any], weight_class: str, rows: int) -> float:
    """Return the bytes of the weights that a step of `rows` tokens reads, each once. With several rows, the number of
    experts that are read is its expectation for independent, uniform choices.

    Args:
        config: the model's shape.
        weight_class: `16-bit` or `4-bit`.
        rows: number of tokens.
    """
    total = 0.0
    for module in modules(config):
        if module.name.endswith("embed_tokens"):
            continue  # one row per token
        share = 1.0
        if module.experts:
            active = config["num_experts_per_tok"]
            share = module.experts * (1 - (1 - active / module.experts) ** rows)
        bits = 4.5 if weight_class == "4-bit" and module.is_quantized else 16
        total += share * float(np.prod(module.shape)) * bits / 8
    return total


class Mixtures:
    """Paths of the forms of a shape; each is made at first use and kept in a folder."""

    def __init__(self, name: str, folder: Path) -> None:
        """
        Args:
            name: name in `SHAPES`.
            folder: folder of the forms; the caller removes it.
        """
        self.config = SHAPES[name]
        self._name = name
        self._folder = folder

    def path(self, form: str) -> Path:
        """Return the file or folder of a form."""
        is_folder = form in ("folder", "packed")
        path = self._folder / f"{self._name}-{form}{'' if is_folder else '.gguf'}"
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            partial = self._folder / f"partial-{path.name}"
            (self._write_folder if is_folder else self._write_gguf)(partial, form)
            partial.rename(path)  # atomic
        return path

    def _write_folder(self, path: Path, form: str) -> None:
        path.mkdir(exist_ok=True)
        config, tensors = dict(self.config), {}
        if form == "packed":
            weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
            quantization = group_config("pack-quantized", weights)
            quantization["ignore"] = ["lm_head", r"re:.*mlp\.gate$", r"re:.*kv_b_proj$"]
            config["quantization_config"] = quantization
        for module in modules(self.config):
            for expert in range(max(1, module.experts)):
                name, value = module.name_of(expert), module.value(expert)
                if form == "packed" and module.is_quantized:
                    found = rounded(value.float(), GROUP, symmetric=True)
                    tensors |= {
                        f"{name}.weight_packed": pack(found.codes),
                        f"{name}.weight_scale": found.scales,
                        f"{name}.weight_shape": torch.tensor(value.shape),
                    }
                else:
                    tensors[f"{name}.weight"] = value
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        (path / "tokenizer.json").write_text(tiny.tokenizer(tiny.config())._make().to_str())
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    def _write_gguf(self, path: Path, form: str) -> None:
        c = self.config
        is_latent = "kv_lora_rank" in c
        writer = gguf.GGUFWriter(path, "deepseek2" if is_latent else "qwen3moe")
        writer.add_vocab_size(c["vocab_size"])
        writer.add_tokenizer_model("no_vocab")
        writer.add_context_length(c["max_position_embeddings"])
        writer.add_embedding_length(c["hidden_size"])
        writer.add_block_count(c["num_hidden_layers"])
        writer.add_feed_forward_length(c["intermediate_size"])
        writer.add_head_count(c["num_attention_heads"])
        writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
        writer.add_rope_freq_base(c["rope_theta"])
        writer.add_expert_count(c.get("num_experts") or c["n_routed_experts"])
        writer.add_expert_used_count(c["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
        if is_latent:
            rank, rotated, plain, value = (
                c[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
            )
            writer.add_head_count_kv(1)
            writer.add_key_length(rank + rotated)
            writer.add_value_length(rank)
            writer.add_key_length_mla(plain + rotated)
            writer.add_value_length_mla(value)
            writer.add_kv_lora_rank(rank)
            writer.add_q_lora_rank(c["q_lora_rank"])
            writer.add_rope_dimension_count(rotated)
            writer.add_leading_dense_block_count(c["first_k_dense_replace"])
            writer.add_expert_shared_count(c["n_shared_experts"])
            writer.add_expert_weights_scale(c["routed_scaling_factor"])
            writer.add_expert_weights_norm(c["norm_topk_prob"])
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
        else:
            writer.add_head_count_kv(c["num_key_value_heads"])
            writer.add_key_length(c["head_dim"])
            writer.add_value_length(c["head_dim"])
        wide = gguf.GGMLQuantizationType.F16 if form == "f16" else gguf.GGMLQuantizationType.BF16
        for module in modules(c):
            kind = gguf.GGMLQuantizationType.F32
            if not module.is_norm and not module.name.endswith("mlp.gate"):
                kind = gguf.GGMLQuantizationType.Q4_0 if form == "q4_0" and module.is_quantized else wide
            for name, values in self._gguf_values(module):
                data = np.stack([_encoded(each, kind) for each in values])
                writer.add_tensor(f"{name}.weight", data if module.experts else data[0], raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _gguf_values(self, module: Module) -> list[tuple[str, list[torch.Tensor]]]:
        """Return the GGUF tensors of a module: name, and the values of each expert."""
        values = [module.value(expert) for expert in range(max(1, module.experts))]
        if module.name in _TOP:
            return [(_TOP[module.name], values)]
        layer, _, rest = module.name.removeprefix("model.layers.").partition(".")
        if rest != "self_attn.kv_b_proj":
            return [(f"blk.{layer}.{_LAYER[rest]}", values)]
        plain = self.config["qk_nope_head_dim"]
        parts = values[0].view(self.config["num_attention_heads"], -1, module.shape[1])
        keys = parts[:, :plain].transpose(1, 2).contiguous()
        return [(f"blk.{layer}.attn_k_b", [keys]), (f"blk.{layer}.attn_v_b", [parts[:, plain:].contiguous()])]


def _encoded(values: torch.Tensor, kind: gguf.GGMLQuantizationType) -> Any:
    if kind == gguf.GGMLQuantizationType.Q4_0:
        found = rounded(values.float(), GROUP, symmetric=True)
        codes = found.codes.reshape(len(values), -1, GROUP).astype(np.uint8)
        nibbles = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
        scales = found.scales.numpy()[..., None].view(np.uint8)
        return np.concatenate([scales, nibbles], axis=-1).reshape(len(values), -1)
    if kind == gguf.GGMLQuantizationType.BF16:
        return values.view(torch.uint8).numpy()
    return values.to(torch.float16 if kind == gguf.GGMLQuantizationType.F16 else torch.float32).numpy()
