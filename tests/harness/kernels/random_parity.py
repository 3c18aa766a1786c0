"""Compares the greedy tokens of a model with random weights with those of transformers with the same weights, in
float32.

Transformers computes each prompt and its generated tokens in one pass. If its most likely token at each position equals
the generated token, then it would have generated the same tokens.
"""

import torch

from harness.fakes.stepping import generate
from harness.kernels.transformers_twin import twin_of
from kvferry.bench.roofline import random_tokens
from kvferry.core.dtypes import FLOAT32
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.models.random_tensors import RandomTensors
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kv.pages.layout import KvLayout
from kvferry.weights.config import ModelConfig

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
    """Return the number of generated tokens, over all prompts, that differ from transformers' greedy choice.

    Args:
        config: the model's configuration.
        device: device of both implementations.
        kernels: kernel backend of kvferry's engine.
        prompts: number of prompts, all in one batch; prompt i has i tokens fewer.
        prompt_tokens: length of the longest prompt.
        new_tokens: number of tokens to generate per prompt.
        seed: seed of the weights.
    """
    tensors = RandomTensors(config, dtype=torch.float32, device=device, seed=seed)
    model = build_model(config, tensors, dtype=FLOAT32, kernels=kernels, device=str(device))
    shape = KvLayout.of(config, block_tokens=_BLOCK_TOKENS, dtype=FLOAT32)
    blocks = prompts * -(-(prompt_tokens + new_tokens) // _BLOCK_TOKENS)
    given = [random_tokens(config, prompt_tokens - index, seed + index) for index in range(prompts)]
    ours = generate(Runner(model, PagedKv.allocate(shape, blocks, device)), given, new_tokens)
    theirs = twin_of(config, tensors).to(device)
    wrong = 0
    for one in ours:
        row = torch.tensor([one.tokens[:-1]], device=device)
        reference_tokens = theirs(row, logits_to_keep=new_tokens).logits[0].argmax(-1).tolist()
        wrong += sum(a != b for a, b in zip(reference_tokens, one.tokens[len(one.prompt) :], strict=True))
    return wrong
