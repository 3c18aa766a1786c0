"""Shares of a model: together they are the whole, and each is a model of its own shape."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvferry.core.errors import UsageError
from kvferry.engine.execute.models.share_tensors import ShareTensors
from kvferry.model import tiny
from kvferry.weights.config import Experts, Latent, ModelConfig
from kvferry.weights.shares import MAX_RANKS, Share, check_divides, config_of_share, cut_of
from kvferry.weights.tensors import check_shapes, expected_shapes

EXPERTS = Experts(4, 2, 24, renormalizes=True, shared_size=12, has_biases=True, dense_layers=(0,))
BASE = [
    replace(tiny.config(qkv_bias=True), output_bias=True, attention_sinks=True),
    replace(tiny.config(qk_norm=True), experts=EXPERTS, tie_word_embeddings=True),
    replace(tiny.config(), num_kv_heads=1, head_dim=96, latent=Latent(96, 32, 64, 16, 48)),
    replace(tiny.config(), num_kv_heads=1, head_dim=48, latent=Latent(64, 16, 32, 48, None)),
]


@st.composite
def divided(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    base = draw(st.sampled_from(BASE))
    heads = draw(st.sampled_from([4, 6, 8, 12]))
    config = replace(
        base,
        num_heads=heads,
        num_kv_heads=1 if base.latent else draw(st.sampled_from([h for h in (1, 2, 3, 4, 6) if heads % h == 0])),
        intermediate_size=draw(st.sampled_from([24, 48, 96])),
        vocab_size=draw(st.integers(259, 400)),
    )
    size = draw(st.integers(2, 12))
    try:
        check_divides(config, size)
    except UsageError:
        assume(False)
    return config, size


@given(divided())
def test_shares_are_models_whose_tensors_cover_the_whole(made: tuple[ModelConfig, int]) -> None:
    config, size = made
    shares = [Share(rank, size) for rank in range(size)]
    tensors = tiny.TinyTensors(config)
    parts = [ShareTensors(tensors, config, share) for share in shares]
    for share, part in zip(shares, parts, strict=True):
        check_shapes(config_of_share(config, share), part.shapes(), "a share")
    for name, shape in expected_shapes(config).items():
        seen = np.zeros(shape, int)
        for share in shares:
            cut = cut_of(name, config, share)
            rows = slice(None) if cut.rows is None else slice(cut.rows.start, cut.rows.stop)
            columns = () if cut.columns is None else (slice(cut.columns.start, cut.columns.stop),)
            seen[(rows, *columns)] += 0 if cut.is_zero else 1
        assert seen.min() >= 1, name
        is_summed = name.endswith(("down_proj.weight", "down_proj.bias", "o_proj.weight", "o_proj.bias"))
        if is_summed:
            assert seen.max() == 1, name


def test_the_values_of_a_share_are_those_of_the_whole() -> None:
    config = BASE[0]
    tensors, share = tiny.TinyTensors(config), Share(1, 2)
    part = ShareTensors(tensors, config, share)
    down, output = (f"model.layers.0.{name}" for name in ("mlp.down_proj.weight", "self_attn.o_proj.bias"))
    assert np.array_equal(part.read(down), tensors.read(down)[:, 56:])
    stored = part.stored(down)
    assert np.array_equal(stored.data.view(np.float32).reshape(48, 56), tensors.read(down)[:, 56:])
    assert not part.read(output).any()
    query = "model.layers.1.self_attn.q_proj.weight"
    rows = part.stored(query)
    assert np.array_equal(rows.data.view(np.float32).reshape(32, 48), tensors.read(query)[32:])


def test_one_rank_and_most_ranks() -> None:
    check_divides(replace(BASE[0], num_heads=9), 1)
    many = replace(tiny.config(), num_heads=64, intermediate_size=64, vocab_size=2048)
    check_divides(many, MAX_RANKS)
    assert Share(63, 64).kv_heads_of(2) == range(1, 2)
    with pytest.raises(UsageError, match="vocabulary"):
        check_divides(replace(many, vocab_size=1000), MAX_RANKS)
