"""Rotary tables are those of transformers' functions, for every scaling, partly rotated heads and lengths."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvferry.engine.execute.models.rotary import inverse_frequencies, rotary_table
from kvferry.model import tiny
from kvferry.weights.config import LayerRope, ModelConfig
from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.families.rope_fields import read_rope

HEAD_DIM, MOST = 32, 4096
EXACT = 6e-7
"""Tolerance of the relative error of float32 operations, because transformers also rounds the exponents."""
FACTORS = [1.0 + 0.25 * i for i in range(HEAD_DIM // 2)]
SCALINGS: dict[str, dict[str, object]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-mscale": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 512, "mscale": 1.0,
        "mscale_all_dim": 0.7, "beta_fast": 16.0, "beta_slow": 2.0,
    },
    "yarn-untruncated": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "truncate": False,
        "attention_factor": 1.3,
    },
    "yarn-without-factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024},
    "longrope": {
        "rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS[::-1],
        "original_max_position_embeddings": 1024,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}  # fmt: skip


def config_of(scaling: dict[str, object], share: float = 1.0) -> tuple[ModelConfig, LlamaConfig]:
    """Return our configuration, read from a file, and that of transformers."""
    count = int(HEAD_DIM * share) // 2
    factors = {key: value[:count] for key, value in scaling.items() if isinstance(value, list)}
    parameters = {"rope_theta": 50000.0, "partial_rotary_factor": share, **scaling, **factors}
    raw = {"rope_parameters": dict(parameters), "max_position_embeddings": MOST}
    rope = read_rope(ConfigFields(raw, Path("config.json")), HEAD_DIM, default_theta=10000.0)
    ours = replace(
        tiny.config(), head_dim=HEAD_DIM, rope_theta=rope.theta, rope_scaling=rope.scaling,
        max_model_tokens=rope.context_tokens, rotary_dim=None if share == 1 else rope.rotary_dim,
    )  # fmt: skip
    theirs = LlamaConfig(
        hidden_size=HEAD_DIM * 2, num_attention_heads=2, head_dim=HEAD_DIM, max_position_embeddings=MOST,
        rope_parameters=dict(parameters),
    )  # fmt: skip
    return ours, theirs


@pytest.mark.parametrize("share", [1.0, 0.75])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_angles_are_those_of_transformers(name: str, share: float) -> None:
    ours, theirs = config_of(SCALINGS[name], share)
    kind = str(SCALINGS[name]["rope_type"])
    for served in (600, ours.max_model_tokens):
        config = ours.served(served)
        length = config.max_model_tokens
        expected, factor = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"), seq_len=length)
        np.testing.assert_allclose(inverse_frequencies(config), expected.numpy(), rtol=EXACT)
        cos, sin = rotary_table(config)
        assert cos.shape == (length, HEAD_DIM)
        at, half, turned = 517, HEAD_DIM // 2, len(expected)
        angles = np.float32(at) * inverse_frequencies(config)
        np.testing.assert_allclose(cos[at, :turned], np.cos(angles) * factor, atol=3e-6)
        np.testing.assert_allclose(sin[at, half : half + turned], np.sin(angles) * factor, atol=3e-6)
        assert (cos[:, turned:half] == 1).all()
        assert (sin[:, half + turned :] == 0).all()
        np.testing.assert_array_equal(sin[:, :half], -sin[:, half:])


def test_lengths_change_only_scalings_that_depend_on_them() -> None:
    for name, scaling in SCALINGS.items():
        ours, _ = config_of(scaling)
        short, long = (inverse_frequencies(ours.served(tokens)) for tokens in (600, ours.max_model_tokens))
        assert np.array_equal(short, long) == (name not in {"dynamic", "longrope"}), name
    assert config_of(SCALINGS["dynamic"])[0].max_model_tokens == 3 * MOST


def test_local_layers_have_their_own_base_and_no_scaling() -> None:
    config = replace(
        config_of(SCALINGS["linear"])[0], local_rope_theta=100.0, windows=(8, None), unrotated_layers=(), num_layers=2
    )
    assert [config.rope_of(layer) for layer in range(2)] == [LayerRope.LOCAL, LayerRope.FULL]
    plain = replace(config, rope_scaling=None, rope_theta=100.0, local_rope_theta=None)
    np.testing.assert_array_equal(inverse_frequencies(config, LayerRope.LOCAL), inverse_frequencies(plain))
    cos, sin = rotary_table(config, LayerRope.NONE)
    assert (cos == 1).all()
    assert not sin.any()


def test_the_table_of_a_long_context_takes_little_more_memory_than_itself() -> None:
    config = replace(config_of(SCALINGS["linear"])[0], max_model_tokens=100_000)
    tracemalloc.start()
    try:
        cos, sin = rotary_table(config)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * (cos.nbytes + sin.nbytes)
    at = np.array([16_383, 16_384, 99_999], np.float32)
    angles = np.outer(at, inverse_frequencies(config)).astype(np.float64)
    np.testing.assert_array_equal(cos[at.astype(int), HEAD_DIM // 2 :], np.cos(angles).astype(np.float32))
