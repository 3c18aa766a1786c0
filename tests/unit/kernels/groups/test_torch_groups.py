"""Torch kernels over pages of groups of layers: the logits of whole pages, for any content of pages behind a window."""

import numpy as np
import pytest
from unit.kernels.groups.test_layer_groups import CONFIGS, GroupedWorld
from unit.kernels.test_compiled_step import World, random_steps

from kvferry.engine.execute.models.build import build_model
from kvferry.model import tiny
from kvferry.weights.config import ModelConfig


@pytest.mark.parametrize("kernels", ["torch", "reference"])
@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_released_pages_change_no_logit(config: ModelConfig, kernels: str) -> None:
    rng = np.random.default_rng(1)
    lengths = [33, 90, 310 if kernels == "torch" else 120]
    model = build_model(config, tiny.TinyTensors(config), dtype="float32", kernels=kernels)
    assert model.has_layer_groups
    expected = World(config, lengths, "float32").alone(model)
    world = GroupedWorld(config, lengths, "float32")
    pages = world.pages()
    for pieces in random_steps(lengths, rng):
        got = np.array(model.compute(world.batch(pieces), pages).values)
        at = 0
        for s, first, n in pieces:
            np.testing.assert_allclose(got[at : at + n], expected[s][first : first + n], rtol=0, atol=1e-4)
            at += n
            world.spoil_passed(pages, s, first + n)
