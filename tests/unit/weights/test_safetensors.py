"""Hugging Face folders are read exactly, or refused with the name of the invalid part."""

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from kvferry.core.errors import ModelFileError
from kvferry.model import tiny
from kvferry.model.source import open_model
from kvferry.weights.checkpoints.safetensors_dir import SafetensorsModel
from kvferry.weights.rope import Llama3RopeScaling
from kvferry.weights.tensors import EMBEDDING, HEAD

CONFIG = tiny.config()
RAW: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": CONFIG.vocab_size,
    "hidden_size": CONFIG.hidden_size,
    "intermediate_size": CONFIG.intermediate_size,
    "num_hidden_layers": CONFIG.num_layers,
    "num_attention_heads": CONFIG.num_heads,
    "num_key_value_heads": CONFIG.num_kv_heads,
    "head_dim": CONFIG.head_dim,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "eos_token_id": 258,
    "bos_token_id": 257,
}


def weights(config: object = CONFIG) -> dict[str, np.ndarray]:
    source = tiny.TinyTensors(config)  # type: ignore[arg-type]
    return {name: source.read(name) for name in source.shapes()}


def make_folder(
    folder: Path, raw: dict[str, object] | None = None, tensors: dict[str, np.ndarray] | None = None
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(RAW | (raw or {})))
    save_file(tensors or weights(), folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(tiny.tokenizer(CONFIG)._make().to_str())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": tiny.CHAT_TEMPLATE, "eos_token": {"content": "<|im_end|>"}})
    )
    return folder


def test_a_folder_opens_as_the_model_that_was_saved(tmp_path: Path) -> None:
    source = open_model(str(make_folder(tmp_path / "tiny-folder")))
    assert source.config.name == "tiny-folder"
    assert source.config.eos_token_ids == (258,)
    for name, values in weights().items():
        np.testing.assert_array_equal(source.tensors.read(name), values)
    assert source.tokenizer.encode("hé", add_special=True) == list("hé".encode())
    assert source.chat_template is not None
    assert len(source.digest) == 64
    (tmp_path / "tiny-folder" / "chat_template.jinja").write_text("new")
    again = open_model(str(tmp_path / "tiny-folder"))
    assert again.digest != source.digest
    assert again.chat_template is not None
    assert again.chat_template.source == "new"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt"])
def test_weights_that_can_run_code_are_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "pickled")
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelFileError, match=rf"run code when they are read \({name}\); convert it to safetensors"):
        open_model(str(folder))


def test_half_precision_is_widened_exactly(tmp_path: Path) -> None:
    halves = {name: values.astype(np.float16) for name, values in weights().items()}
    model = SafetensorsModel(make_folder(tmp_path / "f16", tensors=halves))
    for name, values in halves.items():
        np.testing.assert_array_equal(model.read(name), values.astype(np.float32))


def test_bfloat16_is_widened_exactly(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "bf16")
    bits = {name: (values.view(np.uint32) >> 16).astype("<u2") for name, values in weights().items()}
    table, data = {}, b""
    for name, values in bits.items():
        table[name] = {"dtype": "BF16", "shape": values.shape, "data_offsets": [len(data), len(data) + values.nbytes]}
        data += values.tobytes()
    head = json.dumps(table).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
    model = SafetensorsModel(folder)
    for name, values in bits.items():
        np.testing.assert_array_equal(model.read(name).view(np.uint32), values.astype(np.uint32) << 16)


def test_shards_are_put_together_and_a_tied_head_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file beside the shards, here the one with all weights, is not read, and the log names it."""
    caplog.set_level("INFO", "kvferry")
    folder = make_folder(tmp_path / "shards", {"tie_word_embeddings": True})
    tensors = weights() | {HEAD: weights()[EMBEDDING]}
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (folder / "model.safetensors").exists()
    model = SafetensorsModel(folder)
    assert set(model.shapes()) == set(names) - {"lm_head.weight"}
    assert [path.name for path in model.weight_files] == list(parts)
    assert f"{folder / 'model.safetensors'} is not read" in caplog.text


def test_a_head_of_its_own_is_used_even_if_the_configuration_ties_it(tmp_path: Path) -> None:
    model = SafetensorsModel(make_folder(tmp_path / "m", {"tie_word_embeddings": True}))
    assert not model.config.tie_word_embeddings
    np.testing.assert_array_equal(model.read(HEAD), weights()[HEAD])


@pytest.mark.parametrize(
    "name", ["generation_config.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors.index.json"]
)
def test_an_optional_file_that_cannot_be_read_is_not_taken_for_absent(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("gone")
    with pytest.raises(ModelFileError, match=f"{name} is not a regular file or a link to one"):
        open_model(str(folder))
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelFileError, match=f"{name} is not a regular file"):
        open_model(str(folder))


def test_a_path_that_is_too_long_is_refused() -> None:
    with pytest.raises(ModelFileError, match=r"cannot open model '/aaa.*File name too long"):
        open_model("/" + "a" * 5000)


def test_end_tokens_of_the_generation_config_count_too(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [256, 258]}')
    assert SafetensorsModel(folder).config.eos_token_ids == (256, 258)


@pytest.mark.parametrize("token", ["<|im_end|>", {"content": "<|im_end|>"}])
def test_the_end_token_of_the_tokenizer_counts_too(tmp_path: Path, token: object) -> None:
    folder = make_folder(tmp_path / "m", {"eos_token_id": None})
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    source = open_model(str(folder))
    control = source.tokenizer.control_tokens["<|im_end|>"].token_id
    assert source.config.eos_token_ids == source.tokenizer.eos_token_ids == (control,)


def test_the_end_of_a_turn_in_the_template_counts_too(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", {"eos_token_id": 256})
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    control = open_model(str(folder)).tokenizer.control_tokens["<|im_end|>"].token_id
    assert set(open_model(str(folder)).config.eos_token_ids) == {256, control}
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert open_model(str(folder)).config.eos_token_ids == (256,)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama_3_scaling_is_read(tmp_path: Path, key: str) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = SafetensorsModel(make_folder(tmp_path / "m", {key: scaling | {"rope_theta": 5e5}}))
    assert model.config.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 8192)
    assert model.config.rope_theta == 5e5


def test_qwen_variants_are_recognised(tmp_path: Path) -> None:
    for architecture, config in (
        ("Qwen2ForCausalLM", tiny.config(qkv_bias=True)),
        ("Qwen3ForCausalLM", tiny.config(qk_norm=True)),
    ):
        raw = {"architectures": [architecture], "sliding_window": 4096, "use_sliding_window": False}
        model = SafetensorsModel(make_folder(tmp_path / architecture, raw, weights(config)))
        assert (model.config.qkv_bias, model.config.qk_norm) == (config.qkv_bias, config.qk_norm)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM', which is not supported"),
        ({"architectures": None}, "architectures names None"),
        ({"architectures": [[]]}, "architectures names .., which is not supported"),
        ({"layer_types": 5}, "layer_types = 5"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"sliding_window": 128}, "sliding_window = 128"),
        (
            {"use_sliding_window": True},
            "use_sliding_window = True is not supported: kvferry does not implement this feature",
        ),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {}}, "quantization_config"),
        ({"rope_scaling": {"type": "xpos"}}, "type 'xpos' is not supported; use one of default, linear"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor must be a positive number"),
        ({"rope_scaling": "llama3"}, "must be an object"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"num_hidden_layers": 3}, "9 tensors are missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most 4096"),
        ({"num_hidden_layers": 4000}, "only 21 tensors for 4000 layers"),
        ({"num_hidden_layers": "2"}, "must be a positive whole number, not '2'"),
        ({"hidden_size": True}, "must be a positive whole number, not True"),
        ({"rms_norm_eps": -1}, "must be a positive number, not -1"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number"),
        ({"max_position_embeddings": 50_000_000}, "max_position_embeddings is 50000000, .* at most 4194304"),
        ({"vocab_size": 260}, r"is \[259, 48\] instead of \[260, 48\]"),
        ({"tie_word_embeddings": False, "eos_token_id": [999]}, "end token 999"),
    ],
)
def test_models_that_cannot_be_served_are_refused_by_name(tmp_path: Path, raw: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        SafetensorsModel(make_folder(tmp_path / "m", raw))


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    text = json.loads((folder / "tokenizer.json").read_text())
    text["model"]["vocab"]["extra"] = 259
    (folder / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(ModelFileError, match="has 260 tokens, but the model has only 259"):
        open_model(str(folder))
    del text["model"]["vocab"]["extra"]
    text["model"]["vocab"] |= {next(iter(text["model"]["vocab"])): 4_000_000}
    (folder / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(ModelFileError, match="a token with id 4000000, but the model has only 259"):
        open_model(str(folder))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"not a usable tokenizer\.json"):
        open_model(str(folder))


def test_a_begin_token_beyond_the_model_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 300)])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelFileError, match="a token with id 300, but the model has only 259"):
        open_model(str(folder))


def test_truncation_and_padding_in_a_tokenizer_file_are_ignored(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    whole = open_model(str(folder)).tokenizer.encode("a long prompt", add_special=False)
    text = json.loads((folder / "tokenizer.json").read_text())
    text["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    text["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    (folder / "tokenizer.json").write_text(json.dumps(text))
    assert open_model(str(folder)).tokenizer.encode("a long prompt", add_special=False) == whole


@pytest.mark.parametrize(
    "template", [[{"name": ["default"], "template": "x"}], [{"name": "default", "template": 5}], 7]
)
def test_a_chat_template_that_is_no_text_is_none(tmp_path: Path, template: object) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert open_model(str(folder)).chat_template is None


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_named_pipe_or_device_in_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "m")
    for replace in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (folder / name).unlink()
        replace(folder / name)
        with pytest.raises(ModelFileError, match=name.replace(".", r"\.")):
            open_model(str(folder))


def edit_header(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        table = json.loads(data[8 : 8 + length])
        change(table)
        head = json.dumps(table).encode()
        return struct.pack("<Q", len(head)) + head + data[8 + length :]

    return edit


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d[:5], "its header has"),
        (lambda d: struct.pack("<Q", 1 << 62) + d[8:], "its header has 4611686018427387904 bytes"),
        (lambda d: d[:8] + b"x" + d[9:], "not JSON"),
        (lambda d: struct.pack("<Q", 2) + b"[]" + d[8:], "not an object"),
        (lambda d: d[:-1], "its tensors end at"),
        (lambda d: d + b"x", "its tensors end at"),
        (edit_header(lambda t: t.update({NORM: []})), "not described by an object"),
        (
            edit_header(lambda t: t[NORM].update(dtype="F8_E4M3")),
            "type F8_E4M3, which is not supported here; supported types: F32, F16, BF16. Use",
        ),
        (edit_header(lambda t: t[NORM].update(dtype=[1])), "use one of"),
        (edit_header(lambda t: t[NORM].update(shape=[1 << 40])), "does not fill"),
        (edit_header(lambda t: t[NORM].update(shape=[-1])), "has shape"),
        (edit_header(lambda t: t[NORM].update(shape=[1] * 200_000)), "has 200000 dimensions"),
        (edit_header(lambda t: t[NORM].update(shape=None)), "has shape"),
        (edit_header(lambda t: t[NORM].update(data_offsets=[0, 192])), "a hole or an overlap"),
        (edit_header(lambda t: t[NORM].update(data_offsets=[0])), "data_offsets .0., which must be two"),
        (lambda d: struct.pack("<Q", 3 << 20) + b"::," * (1 << 20) + d[8:], "has more than 1048576 fields"),
        (lambda d: struct.pack("<Q", 16) + b'{"a": 1, "a": 2}' + d[8:], "key 'a' appears twice"),
        (edit_header(lambda t: t.pop(NORM)), "a hole or an overlap|its tensors end"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    folder = make_folder(tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelFileError, match=message):
        SafetensorsModel(folder)


def test_a_flipped_byte_in_the_header_is_refused_or_leaves_a_usable_file(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    head = int.from_bytes(data[:8], "little") + 8

    @settings(max_examples=200, deadline=None)
    @given(st.integers(0, head - 1), st.integers(1, 255))
    def flip(place: int, bits: int) -> None:
        data[place] ^= bits
        file.write_bytes(data)
        data[place] ^= bits
        try:
            model = SafetensorsModel(folder)
            for name in model.shapes():
                model.read(name)
        except ModelFileError:
            pass

    flip()


def test_empty_stacks_of_unknown_layers_take_no_more_memory_than_their_names(tmp_path: Path) -> None:
    raw = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 1024, "hidden_act": "silu"}
    folder = make_folder(tmp_path / "m", raw)
    entry = {"dtype": "F32", "shape": [1024, 0, 0], "data_offsets": [0, 0]}
    edit = edit_header(lambda t: t.update({f"model.layers.{i}.mlp.experts.down_proj": entry for i in range(9, 999)}))
    file = folder / "model.safetensors"
    file.write_bytes(edit(file.read_bytes()))
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match="tensors are unknown for gpt_oss"):
            SafetensorsModel(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 128 << 20


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": "../outside.safetensors"}}', "not a file in the folder"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "not a file in the folder"),
        ('{"weight_map": {"a": "a\\u0000b"}}', "not a file in the folder"),
        ('{"weight_map": {"a": "\\ud800"}}', "not a file in the folder"),
        ("[]", "must contain a JSON object, not a list"),
        ("{", "not valid JSON"),
    ],
)
def test_an_invalid_index_is_refused(tmp_path: Path, index: str, message: str) -> None:
    folder = make_folder(tmp_path / "m")
    save_file(weights(), tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelFileError, match=message):
        SafetensorsModel(folder)


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"neither model\.safetensors nor"):
        SafetensorsModel(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"cannot read .*config\.json"):
        SafetensorsModel(folder)


def test_released_pages_are_read_from_the_file_again(tmp_path: Path) -> None:
    source = SafetensorsModel(make_folder(tmp_path))
    for name, values in weights().items():
        source.release()
        assert np.array_equal(source.read(name), values)
