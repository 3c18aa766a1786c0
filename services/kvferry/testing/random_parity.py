"""Greedy tokens of a model with random weights, beside those of transformers with the same weights, in float32.

Transformers reads each prompt with the tokens that were generated behind it in one pass: if its most likely token at
each of those places is the one that came, generating with it would have given the same ones.
"""

import torch

from kvferry.bench.roofline import random_tokens
from kvferry.core.dtypes import FLOAT32
from kvferry.engine.cache import PagedKv, PageShape
from kvferry.engine.models.build import build_model
from kvferry.engine.models.random_tensors import RandomTensors
from kvferry.engine.runner import Runner
from kvferry.model.config import ModelConfig
from kvferry.testing.stepping import generate
from kvferry.testing.transformers_twin import twin_of

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
    model = build_model(config, tensors, dtype=FLOAT32, kernels=kernels, device=str(device))
    shape = PageShape.of(config, block_tokens=_BLOCK_TOKENS, dtype=FLOAT32)
    blocks = prompts * -(-(prompt_tokens + new_tokens) // _BLOCK_TOKENS)
    given = [random_tokens(config, prompt_tokens - index, seed + index) for index in range(prompts)]
    ours = generate(Runner(model, PagedKv.allocate(shape, blocks, device)), given, new_tokens)
    theirs = twin_of(config, tensors).to(device)
    wrong = 0
    for one in ours:
        row = torch.tensor([one.tokens[:-1]], device=device)
        said = theirs(row, logits_to_keep=new_tokens).logits[0].argmax(-1).tolist()
        wrong += sum(a != b for a, b in zip(said, one.tokens[len(one.prompt) :], strict=True))
    return wrong
