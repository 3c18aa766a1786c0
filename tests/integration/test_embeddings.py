"""Vectors of the embedded model are those of transformers' hidden states, also in chunks beside other prompts."""

import numpy as np
import pytest
import torch
from harness.idle import assert_idle
from harness.kernels.transformers_twin import twin_of

from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine import LLM
from kvferry.model.source import ModelSource

TEXTS = [
    "The capital of France is Paris.",
    "x",
    "東京は日本の首都です。" * 20,
    "def add(a, b):\n    return a + b\n" * 30,
]


@pytest.mark.timeout(240)
def test_vectors_of_the_embedded_model_are_those_of_transformers(smollm: ModelSource) -> None:
    limits = SchedulerLimits(max_chunk_tokens=100)
    llm = LLM("smollm2-135m-instruct", dtype="float32", kv_memory=256 << 20, limits=limits)
    twin = twin_of(smollm.config, smollm.tensors)
    found = {pooling: llm.encode(TEXTS, pooling=pooling) for pooling in ("cls", "mean", "last")}
    assert_idle(llm.engine)
    for index, text in enumerate(TEXTS):
        ids = llm.tokenizer.encode(text, add_special=True)
        with torch.inference_mode():
            rows = twin.model(torch.tensor([ids])).last_hidden_state[0].double().numpy()
        for pooling, row in (("last", rows[-1]), ("mean", rows.mean(axis=0)), ("cls", rows[0])):
            out = found[pooling][index]
            assert out.prompt_token_ids == tuple(ids)
            np.testing.assert_allclose(out.embedding, row / np.linalg.norm(row), atol=2e-4, err_msg=pooling)
    near, far = llm.score("A cat sits on the mat.", ["A kitten sits on a rug.", "Interest rates rose in May."])
    assert near > far
