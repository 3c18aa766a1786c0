"""Checkpoints of the comparison of mixtures: the same values in every form, and the bytes that a step reads."""

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from peers import mixtures  # noqa: E402

from kvferry.weights.checkpoints.safetensors_dir import SafetensorsModel  # noqa: E402

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 288,
}
OF_QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
OF_DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
SHAPES = {
    "qwen3_moe": mixtures.QWEN3_MOE | SMALL | OF_QWEN,
    "deepseek_v2": mixtures.DEEPSEEK_V2 | SMALL | OF_DEEPSEEK,
}


@pytest.fixture(params=SHAPES)
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> mixtures.Mixtures:
    monkeypatch.setattr(mixtures, "SHAPES", SHAPES)
    return mixtures.Mixtures(request.param, tmp_path)


def values_in(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a GGUF file."""
    return {
        tensor.name: np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(
            tuple(int(n) for n in reversed(tensor.shape))
        )
        for tensor in gguf.GGUFReader(path).tensors
    }


@pytest.mark.parametrize(("folder", "file"), [("folder", "bf16"), ("packed", "q4_0")])
def test_a_folder_and_a_gguf_have_the_same_values(made: mixtures.Mixtures, folder: str, file: str) -> None:
    ours, theirs = SafetensorsModel(made.path(folder)), values_in(made.path(file))
    expert = "model.layers.1.mlp.experts.3.down_proj.weight"
    np.testing.assert_array_equal(ours.read(expert), theirs["blk.1.ffn_down_exps.weight"][3])
    for name, of_gguf in (
        ("lm_head", "output"),
        ("model.layers.1.self_attn.o_proj", "blk.1.attn_output"),
        ("model.layers.1.mlp.gate", "blk.1.ffn_gate_inp"),
    ):
        np.testing.assert_array_equal(ours.read(f"{name}.weight"), theirs[f"{of_gguf}.weight"])


@pytest.mark.parametrize(("form", "weights"), [("bf16", "16-bit"), ("q4_0", "4-bit")])
def test_a_step_of_many_rows_reads_all_weights_but_the_embedding(
    made: mixtures.Mixtures, form: str, weights: str
) -> None:
    tensors = gguf.GGUFReader(made.path(form)).tensors
    stored = sum(
        tensor.n_elements * 2 if tensor.tensor_type == gguf.GGMLQuantizationType.F32 else tensor.n_bytes
        for tensor in tensors
        if tensor.name != "token_embd.weight"
    )
    config = made.config
    assert mixtures.step_bytes(config, weights, 10_000) == pytest.approx(stored)
    one, two = (mixtures.step_bytes(config, weights, rows) for rows in (1, 2))
    layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    expert = 3 * config["hidden_size"] * config["moe_intermediate_size"] * (4.5 if weights == "4-bit" else 16) / 8
    assert two - one == pytest.approx(layers * expert)  # of 4 experts, 2 rows of 2 each use 3 on average
