"""Heads that are damaged or do not fit the model are refused by file, field or tensor, and value."""

import os
from pathlib import Path

import numpy as np
import pytest
from harness.kernels.head_files import eagle_tensors, write_eagle, write_medusa
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import ModelFileError
from kvferry.model import tiny
from kvferry.weights.heads.eagle_head import read_eagle
from kvferry.weights.heads.head_files import open_head
from kvferry.weights.heads.medusa_head import read_medusa

MODEL = tiny.config()
_FC = np.zeros((48, 96), np.float32)
_D2T = eagle_tensors(MODEL, is_fused=True, drafted=100)["d2t"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 1000}, "vocab_size is 1000, but tiny needs 259"),
        ({"hidden_size": 64}, "hidden_size is 64, but tiny needs 48"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64, but tiny needs 48"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, but tiny needs 1"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 2},
            "3 attention heads with 2 KV heads of size 16 are not supported",
        ),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive whole number, not 0"),
        ({"num_attention_heads": "two"}, "num_attention_heads must be a positive whole number"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "odd"}}, "odd"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        (
            {"intermediate_size": 128},
            "mlp.gate_proj.weight' must have shape [128, 48], according to the model and config.json, not [64, 48]",
        ),
    ],
)
def test_an_eagle_head_with_odd_fields_is_refused(fields: dict[str, object], message: str, tmp_path: Path) -> None:
    folder = write_eagle(tmp_path, MODEL, is_fused=False, fields=fields)
    with pytest.raises(ModelFileError) as caught:
        read_eagle(folder, MODEL)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft_vocab_size": 300}, "draft_vocab_size is 300, more than vocab_size 259"),
        ({"draft_vocab_size": 90}, "must have shape [90, 48], according to the model and config.json, not [100, 48]"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, "must be three layers from 0 to 1, not [0, 1]"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "must be three layers from 0 to 1, not [0, 1, 2]"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "must be three layers from 0 to 1, not [2, 1, -1]"),
    ],
)
def test_an_eagle_3_head_with_odd_fields_is_refused(fields: dict[str, object], message: str, tmp_path: Path) -> None:
    folder = write_eagle(tmp_path, MODEL, is_fused=True, drafted=100, fields=fields)
    with pytest.raises(ModelFileError) as caught:
        read_eagle(folder, MODEL)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"fc.weight": None}, "'fc.weight' is missing"),
        (
            {"fc.weight": _FC},
            "'fc.weight' must have shape [48, 144], according to the model and config.json, not [48, 96]",
        ),
        ({"fc.weight": np.zeros((48, 144), np.int64)}, "'fc.weight' has the wrong type I64"),
        ({"d2t": _D2T.astype(np.float32)}, "'d2t' has the wrong type F32"),
        ({"fc.bias": np.full(48, np.nan, np.float32)}, "'fc.bias' has values that are not finite"),
        ({"extra.weight": _FC}, "'extra.weight' is unknown"),
        ({"d2t": None, "t2d": None}, "'d2t' is missing"),
        ({"d2t": _D2T + 200}, "'d2t' does not list 100 different tokens of 259"),
        ({"d2t": np.zeros_like(_D2T) - np.arange(100)}, "'d2t' does not list 100 different tokens of 259"),
        ({"t2d": np.zeros(259, np.bool_)}, "'t2d' does not have the tokens of d2t"),
        ({"t2d": np.zeros(8, np.bool_)}, "'t2d' does not have the tokens of d2t"),
        ({"norm.weight": np.full(48, np.inf, np.float32)}, "'norm.weight' has values that are not finite"),
        ({"layers.0.mlp.up_proj.weight": np.zeros((64, 48), np.float32)}, "is stored under two names"),
    ],
)
def test_an_eagle_3_head_with_odd_tensors_is_refused(
    tensors: dict[str, np.ndarray | None], message: str, tmp_path: Path
) -> None:
    folder = write_eagle(tmp_path, MODEL, is_fused=True, drafted=100, tensors=tensors)
    with pytest.raises(ModelFileError) as caught:
        read_eagle(folder, MODEL)
    assert message in str(caught.value)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({"medusa_num_heads": 17}, {}, "medusa_num_heads is 17; at most 16"),
        ({"medusa_num_heads": 4}, {}, "'3.0.linear.weight' is missing"),
        ({"medusa_num_heads": 2}, {}, "'2.0.linear.bias' is unknown"),
        ({"medusa_num_layers": 9}, {}, "medusa_num_layers is 9; at most 8"),
        ({"hidden_size": 64}, {}, "hidden_size is 64, but tiny needs 48"),
        ({"medusa_num_heads": None}, {}, "medusa_num_heads must be a positive whole number"),
        (
            {},
            {"1.1.weight": np.zeros((1000, 48), np.float32)},
            "must have shape [259, 48], according to the model and config.json, not [1000, 48]",
        ),
        ({}, {"0.0.linear.bias": np.full(48, np.nan, np.float32)}, "not finite"),
    ],
)
def test_odd_medusa_heads_are_refused(
    fields: dict[str, object], tensors: dict[str, np.ndarray | None], message: str, tmp_path: Path
) -> None:
    folder = write_medusa(tmp_path, MODEL, fields=fields, tensors=tensors)
    with pytest.raises(ModelFileError) as caught:
        read_medusa(folder, MODEL)
    assert message in str(caught.value)


def test_a_pickle_is_refused_with_a_command_to_convert_it(tmp_path: Path) -> None:
    folder = write_eagle(tmp_path, MODEL, is_fused=False)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"pytorch_model\.bin can execute code when it is loaded: convert it"):
        read_eagle(folder, MODEL)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(
        ModelFileError, match=r"has no model\.safetensors; use the checkpoint folder of a speculation head"
    ):
        read_eagle(folder, MODEL)


@given(st.data())
def test_a_cut_file_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = write_eagle(tmp_path_factory.mktemp("head"), MODEL, is_fused=True, drafted=50)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        read_eagle(folder, MODEL)


def test_copies_of_the_embedding_and_other_names_of_the_layer_are_accepted(tmp_path: Path) -> None:
    found = eagle_tensors(MODEL, is_fused=True, drafted=60)
    renamed = {name.replace("midlayer.", "layers.0."): values for name, values in found.items()}
    others = dict.fromkeys(found) | renamed | {"embed_tokens.weight": np.zeros((259, 48), np.float32)}
    head = read_eagle(write_eagle(tmp_path, MODEL, is_fused=True, drafted=60, tensors=others), MODEL)
    assert head.token_ids is not None
    assert np.array_equal(head.token_ids - np.arange(60), found["d2t"])
    assert head.layers == (0, 1, 1)


def test_a_head_whose_file_is_truncated_after_it_was_opened_is_read_to_its_end(tmp_path: Path) -> None:
    folder = write_eagle(tmp_path, MODEL, is_fused=False)
    opened = open_head(folder, ["model.safetensors"], {}, ())
    (file,) = folder.glob("*.safetensors")
    os.truncate(file, 8)
    for name in opened.shapes():
        assert np.isfinite(opened.read(name)).all()  # a mapped file would end this process with SIGBUS
