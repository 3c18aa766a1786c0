"""Greedy tokens of a model with random weights, beside those of transformers with the same weights, in float32.

Transformers reads each prompt with the tokens that were generated behind it in one pass: if its most likely token at
each of those places is the one that came, generating with it would have given the same ones.
"""

from typing import Any

import torch
import transformers

from kvferry.bench.roofline import random_tokens
from kvferry.engine.cache import PagedKv, PageShape
from kvferry.engine.models.build import build_model
from kvferry.engine.models.random_tensors import RandomTensors
from kvferry.engine.runner import Runner
from kvferry.model.config import ModelConfig
from kvferry.testing.stepping import generate

_CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_BLOCK_TOKENS = 16


@torch.inference_mode()
def differing_tokens(
    config: ModelConfig,
    device: torch.device | str,
    *,
    kernels: str = "auto",
    prompts: int = 8,
    prompt_tokens: int = 200,
    new_tokens: int = 32,
    seed: int = 0,
) -> int:
    """How many generated tokens transformers would not have chosen, over all prompts.

    Args:
        config: the shape.
        device: of both.
        kernels: what computes on our side.
        prompts: sequences, all in one batch; the i-th has i tokens fewer.
        prompt_tokens: of the longest.
        new_tokens: of each.
        seed: of the weights.
    """
    tensors = RandomTensors(config, dtype=torch.float32, device=device, seed=seed)
    model = build_model(config, tensors, dtype=torch.float32, kernels=kernels, device=device)
    shape = PageShape.of(config, block_tokens=_BLOCK_TOKENS, dtype=torch.float32)
    blocks = prompts * -(-(prompt_tokens + new_tokens) // _BLOCK_TOKENS)
    given = [random_tokens(config, prompt_tokens - index, seed + index) for index in range(prompts)]
    ours = generate(Runner(model, PagedKv.allocate(shape, blocks, device)), given, new_tokens)
    theirs = _theirs(config, tensors).to(device)
    wrong = 0
    for one in ours:
        row = torch.tensor([one.tokens[:-1]], device=device)
        said = theirs(row, logits_to_keep=new_tokens).logits[0].argmax(-1).tolist()
        wrong += sum(a != b for a, b in zip(said, one.tokens[len(one.prompt) :], strict=True))
    return wrong


def _theirs(config: ModelConfig, tensors: RandomTensors) -> Any:
    """The same model as a class of transformers."""
    name = _CLASSES[config.architecture]
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
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
    state = {name: torch.from_numpy(tensors.read(name)) for name in tensors.shapes()}
    _, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    model.tie_weights()
    return model
