"""A header with any values becomes the fields of a config.json, or is refused."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import ModelFileError
from kvferry.weights.checkpoints.gguf.architectures import ARCHITECTURES
from kvferry.weights.checkpoints.gguf.config_fields import architecture_of, config_fields
from kvferry.weights.checkpoints.gguf.header import Array, Header, TensorInfo, Value
from kvferry.weights.checkpoints.gguf.tensor_views import LONG_FACTORS, SHORT_FACTORS
from kvferry.weights.families.registry import FAMILIES, read_config

PATH = Path("x.gguf")
USUAL: dict[str, Value] = {
    "block_count": 4,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 80,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "vocab_size": 300,
}
OTHERS = (
    "attention.key_length", "attention.value_length", "attention.key_length_mla", "attention.value_length_mla",
    "attention.kv_lora_rank", "attention.q_lora_rank", "attention.scale", "attention.sliding_window",
    "attn_logit_softcapping", "final_logit_softcapping", "embedding_scale", "residual_scale", "logit_scale",
    "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
    "expert_shared_count", "expert_gating_func", "expert_group_count", "expert_group_used_count",
    "expert_weights_norm", "expert_weights_scale", "leading_dense_block_count", "rope.dimension_count",
    "rope.freq_base", "rope.freq_base_swa", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor",
    "rope.scaling.original_context_length", "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_beta_fast",
    "nextn_predict_layers", "unknown",
)  # fmt: skip
VALUES = (
    st.integers(0, 300)
    | st.integers(-(1 << 31), 1 << 63)
    | st.floats(width=32)
    | st.booleans()
    | st.sampled_from(["", "none", "linear", "yarn", "longrope"])
    | st.just(Array(b"", "i", 0, 0))
)
INFO = TensorInfo("t", (8,), 0, 0, 32)


def header(name: str, pairs: dict[str, Value], tensors: tuple[str, ...] = ()) -> Header:
    found: dict[str, Value] = {f"{name}.{key}": value for key, value in pairs.items()}
    return Header({"general.architecture": name} | found, dict.fromkeys(tensors, INFO))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_values_give_a_configuration_or_are_refused(name: str) -> None:
    @settings(max_examples=300, deadline=None)
    @given(
        st.dictionaries(st.sampled_from([*USUAL, *OTHERS]), VALUES, max_size=12),
        st.booleans(),
        st.lists(st.floats(width=32), max_size=12),
    )
    def check(drawn: dict[str, Value], is_long: bool, factors: list[float]) -> None:
        tensors = (LONG_FACTORS, SHORT_FACTORS, "blk.0.exp_probs_b.bias") if is_long else ()
        made = header(name, USUAL | drawn, tensors)
        with contextlib.suppress(ModelFileError):
            config = read_config(config_fields(made, architecture_of(made, PATH), PATH, lambda _: factors), "m", PATH)
            assert config.architecture in FAMILIES

    check()


def test_values_without_effect_are_accepted_and_others_refused_by_name() -> None:
    def read(**pairs: Value) -> object:
        made = header("llama", USUAL | {key.replace("__", "."): value for key, value in pairs.items()})
        return config_fields(made, architecture_of(made, PATH), PATH, lambda _: [])["rope_scaling"]

    assert read(attention__causal=True, expert_count=0, pooling_type=0, rope__scaling__type="none") is None
    assert read(rope__scaling__type="linear", rope__scaling__factor=4.0) == {"rope_type": "linear", "factor": 4.0}
    for key, value in {"attention__causal": False, "pooling_type": 1, "attention__max_alibi_bias": 8.0}.items():
        with pytest.raises(ModelFileError, match=rf"llama.{key.replace('__', '.')} = {value} is not supported"):
            read(**{key: value})


def test_every_family_names_an_architecture() -> None:
    assert {family.gguf for family in FAMILIES.values()} == set(ARCHITECTURES)
