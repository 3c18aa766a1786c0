"""The embedded model and a runner over it, created once."""

import pytest

from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kv.pages.layout import KvLayout
from kvferry.model.source import ModelSource, open_model


@pytest.fixture(scope="session")
def smollm() -> ModelSource:
    return open_model("smollm2-135m-instruct")


@pytest.fixture(scope="session", params=["compiled", pytest.param("torch", marks=pytest.mark.long)])
def runner(request: pytest.FixtureRequest, smollm: ModelSource) -> Runner:
    """A float32 runner with pages of 16 tokens and room for 12,800 tokens, for each kind of kernels."""
    model = build_model(smollm.config, smollm.tensors, dtype="float32", kernels=request.param)
    return Runner(model, PagedKv.allocate(KvLayout.of(smollm.config, block_tokens=16, dtype="float32"), 800))
