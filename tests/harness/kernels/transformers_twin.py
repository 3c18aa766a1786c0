"""Creates a transformers model with the same weights, as the reference for logits and tokens."""

from typing import Any

import torch
import transformers

from kvferry.weights.config import ModelConfig
from kvferry.weights.rope import Llama3RopeScaling
from kvferry.weights.tensors import HEAD, TensorSource

_CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def twin_of(config: ModelConfig, source: TensorSource) -> Any:
    """Create a transformers model in float32 and inference mode.

    Args:
        config: configuration of an architecture that transformers supports.
        source: source of the weights.
    """
    name = _CLASSES[config.architecture]
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling = config.rope_scaling
    if isinstance(scaling, Llama3RopeScaling):
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    settings = getattr(transformers, f"{name}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_model_tokens,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=config.tie_word_embeddings,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    model = getattr(transformers, f"{name}ForCausalLM")(settings).train(False)
    state = {name: torch.from_numpy(source.read(name).copy()) for name in source.shapes()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert missing == ([HEAD] if config.tie_word_embeddings else []), missing
    model.tie_weights()
    return model
