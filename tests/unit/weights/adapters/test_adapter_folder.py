"""Adapters as PEFT writes them: their tensors, the digest, and refusals by name."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.kernels.lora_files import write
from safetensors.numpy import load_file, save_file

from kvferry.core.errors import ModelFileError
from kvferry.model import tiny
from kvferry.weights.adapters import adapter_folder
from kvferry.weights.adapters.adapter_config import MAX_RANK, read_adapter_config
from kvferry.weights.adapters.adapter_folder import CONFIG_FILE, TENSORS_FILE, read_adapter

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("adapter") / "good", tiny.config(), rank=4)


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / "a")
    return tmp_path / "a"


def change_config(folder: Path, **fields: object) -> None:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(str(folder / TENSORS_FILE))
    change(tensors)
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, str(folder / TENSORS_FILE))


def read(folder: Path, max_rank: int = 64) -> Any:
    return read_adapter(folder, tiny.config(), max_rank=max_rank)


def test_updates_are_scaled_by_alpha_and_rank(folder: Path) -> None:
    tensors = load_file(str(folder / TENSORS_FILE))
    b = tensors[f"{MODULE}.lora_B.weight"]
    for fields, scale in (
        ({"lora_alpha": 8}, 2.0),
        ({"lora_alpha": 8, "use_rslora": True}, 4.0),
        ({"lora_alpha": 8, "alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"lora_alpha": 8, "alpha_pattern": {"layers.1.self_attn.q_proj": 2}}, 2.0),
    ):
        shutil.copy(folder / CONFIG_FILE, folder / "kept")
        change_config(folder, **fields)
        update = read(folder).updates[0, "self_attn.q_proj"]
        assert np.array_equal(update.a, tensors[f"{MODULE}.lora_A.weight"])
        assert np.allclose(update.b, b * scale, rtol=1e-6)
        shutil.move(folder / "kept", folder / CONFIG_FILE)


def test_the_digest_is_one_of_the_content(folder: Path, tmp_path: Path) -> None:
    digest = read(folder).digest
    assert len(digest) == 32
    renamed = shutil.copytree(folder, tmp_path / "b")
    change_config(renamed, base_model_name_or_path="elsewhere", lora_dropout=0.5)
    assert read(renamed).digest == digest, "only fields without an effect differ"

    def as_half(tensors: Tensors) -> None:
        for name in tensors:
            tensors[name] = tensors[name].astype(np.float16)

    change_tensors(renamed, as_half)
    halved = read(renamed).digest
    assert halved != digest
    change_config(renamed, lora_alpha=5)
    assert read(renamed).digest not in (digest, halved)


BAD_CONFIGS: list[tuple[dict[str, object], str]] = [
    ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
    ({"peft_type": None}, "peft_type is None"),
    ({"use_dora": True}, "use_dora is True; DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"lora_bias": True}, "lora_bias"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    ({"a\ud800\n\x1b": 1}, r"a\\ud800\\n\\x1b is 1; this field is unknown"),
    ({"k" * 100: 1}, "kkk is 1; this field is unknown"),
    ({"future_feature": {"a": 1}}, "future_feature is {'a': 1}; this field is unknown"),
    ({"r": 0}, "the rank in r must be a whole number from 1 to 256, not 0"),
    ({"r": True}, "the rank in r must be .*, not True"),
    ({"r": "8"}, "the rank in r must be .*, not '8'"),
    ({"r": MAX_RANK + 1}, "from 1 to 256"),
    ({"r": None}, "the rank in r must be .*, not None"),
    ({"lora_alpha": None}, "lora_alpha must be a number .*, not None"),
    ({"lora_alpha": float("nan")}, "lora_alpha must be a number .*, not nan"),
    ({"lora_alpha": 1e300}, "lora_alpha must be a number .*, not 1e+300"),
    ({"lora_alpha": 10**400}, "lora_alpha must be a number .*, not 10000"),
    ({"alpha_pattern": {"q_proj": -(10**400)}}, "alpha_pattern must be a number .*, not -10000"),
    ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
    ({"rank_pattern": {".*": 8}}, "regular expressions are not supported"),
    ({"rank_pattern": {"q_proj": 999}}, "the rank in rank_pattern must be .*, not 999"),
    ({"rank_pattern": ["q_proj"]}, "rank_pattern must be an object"),
    ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern must be a number .*, not 'x'"),
    ({"rank_pattern": {"q_proj": 8}}, r"lora_A must have shape \[8, 48\], .*, not \[4, 48\]"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_CONFIGS)
def test_a_configuration_that_is_not_plain_lora_is_refused_by_name(
    folder: Path, fields: dict[str, object], message: str
) -> None:
    change_config(folder, **fields)
    with pytest.raises(ModelFileError, match=message.replace("(", r"\(").replace("+", r"\+")) as error:
        read(folder)
    assert error.value.field


def renamed(old: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[new] = tensors.pop(old)

    return change


def reshaped(name: str, *shape: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = np.zeros(shape, np.float32)

    return change


def removed(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def poisoned(tensors: Tensors) -> None:
    tensors[f"{MODULE}.lora_A.weight"][0, 0] = np.nan


A, B = f"{MODULE}.lora_A.weight", f"{MODULE}.lora_B.weight"
BAD_TENSORS: list[tuple[Callable[[Tensors], None], str]] = [
    (lambda t: t.clear(), "has no tensors"),
    (removed(A), "has no lora_A"),
    (removed(B), "has no lora_B"),
    (reshaped(A, 8, 48), r"q_proj.lora_A must have shape .*, not \[8, 48\]"),
    (reshaped(A, 4, 47), r"q_proj.lora_A must have shape .*, not \[4, 47\]"),
    (reshaped(B, 64, 3), r"q_proj.lora_B must have shape .*, not \[64, 3\]"),
    (reshaped(B, 65, 4), r"q_proj.lora_B must have shape .*, not \[65, 4\]"),
    (reshaped(B, 256), r"q_proj.lora_B must have shape .*, not \[256\]"),
    (poisoned, "values that are not finite"),
    (renamed(A, A.replace("layers.0", "layers.7")), "'model.layers.7.self_attn.q_proj'|has no lora_"),
    (renamed(A, A.replace("layers.0", "layers.00")), "only updates to linear layers"),
    (renamed(A, A.replace("q_proj", "z_proj")), "has no lora_"),
    (renamed(A, "base_model.model.lm_head.lora_A.weight"), "updates to the output head are not supported"),
    (
        renamed(A, "base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight"),
        "updates to experts are not supported",
    ),
    (renamed(A, "base_model.model.model.embed_tokens.lora_embedding_A"), "updates to embeddings are not supported"),
    (renamed(A, "base_model.model.model.embed_tokens.weight"), "replacing embeddings is not supported"),
    (renamed(A, f"{MODULE}.lora_magnitude_vector"), "DoRA"),
    (renamed(A, f"{MODULE}.lora_B.bias"), "LoRA biases are not supported"),
    (renamed(A, "x" * 500), "unsupported tensor"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS, ids=[message for _, message in BAD_TENSORS])
def test_tensors_that_do_not_fit_the_model_are_refused_by_name(
    folder: Path, change: Callable[[Tensors], None], message: str
) -> None:
    change_tensors(folder, change)
    with pytest.raises(ModelFileError, match=message) as error:
        read(folder)
    assert len(str(error.value)) < 800


def test_unknown_layers_are_refused_by_name(folder: Path) -> None:
    for half in (A, B):
        change_tensors(folder, renamed(half, half.replace("layers.0", "layers.7")))
    with pytest.raises(ModelFileError, match=r"no linear layer 'model.layers.7.self_attn.q_proj'"):
        read(folder)


def test_a_rank_beyond_the_limit_is_refused(folder: Path) -> None:
    with pytest.raises(ModelFileError, match=r"rank 4; at most 3 is accepted\. Raise max_adapter_rank"):
        read(folder, max_rank=3)


def test_damaged_files_are_refused(folder: Path) -> None:
    path = folder / TENSORS_FILE
    whole = path.read_bytes()
    for cut in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelFileError, match=TENSORS_FILE):
            read(folder)
    path.write_bytes(struct.pack("<Q", 9 << 20) + b" " * (9 << 20))
    with pytest.raises(ModelFileError, match="its header has 9437184 bytes"):
        read(folder)
    path.write_bytes(struct.pack("<Q", 1 << 63) + whole[8:])
    with pytest.raises(ModelFileError, match="its header has"):
        read(folder)
    path.unlink()
    with pytest.raises(ModelFileError, match="cannot open"):
        read(folder)
    (folder / CONFIG_FILE).write_text("[1]")
    with pytest.raises(ModelFileError, match="must contain a JSON object"):
        read(folder)
    (folder / CONFIG_FILE).unlink()
    with pytest.raises(ModelFileError, match=CONFIG_FILE):
        read(folder)


def test_a_file_that_is_truncated_while_it_is_read_does_not_end_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = adapter_folder._check

    def truncating(*args: Any) -> None:
        check(*args)
        os.truncate(folder / TENSORS_FILE, 8)

    expected = read(folder)
    monkeypatch.setattr(adapter_folder, "_check", truncating)
    assert read(folder).digest == expected.digest
    with pytest.raises(ModelFileError, match="not a usable safetensors file"):
        read(folder)


def test_a_file_larger_than_any_adapter_of_the_model_is_refused(folder: Path) -> None:
    os.truncate(folder / TENSORS_FILE, 1 << 40)
    with pytest.raises(ModelFileError, match="has 1099511627776 bytes; at most"):
        read(folder)


def test_a_huge_shape_is_refused_before_anything_is_allocated(folder: Path) -> None:
    header = {A: {"dtype": "F32", "shape": [1 << 40, 1 << 10], "data_offsets": [0, 1 << 52]}}
    raw = json.dumps(header).encode()
    (folder / TENSORS_FILE).write_bytes(struct.pack("<Q", len(raw)) + raw)
    with pytest.raises(ModelFileError, match="end at byte"):
        read(folder)


def test_a_null_pattern_is_an_empty_pattern() -> None:
    raw = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": None, "alpha_pattern": {}}
    config = read_adapter_config(raw, Path("x"))
    assert (config.rank_of("a.q_proj"), config.scale_of("a.q_proj")) == (2, 2.0)
