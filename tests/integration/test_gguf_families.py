"""GGUF files of each family equal the Hugging Face folders that they were made of."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from harness.kernels.family_checkpoints import CHECKPOINTS, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS, YARN, Checkpoint
from harness.kernels.gguf_checkpoints import FORMS, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from integration.test_families import PROMPTS, check, is_long, runner_for

from kvferry.core.errors import ModelFileError
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kv.pages.layout import KvLayout
from kvferry.model.source import open_model
from kvferry.weights.checkpoints.gguf.architectures import ARCHITECTURES
from kvferry.weights.checkpoints.gguf.gguf_model import GgufModel
from kvferry.weights.checkpoints.gguf.header import read_header
from kvferry.weights.checkpoints.safetensors_dir import SafetensorsModel
from kvferry.weights.config import ModelConfig

SCALED = YARN | {"mscale": 1.1, "mscale_all_dim": 1.1}
FULL = {"use_sliding_window": False, "sliding_window": None}
GEMMA: dict[str, object] = {"query_pre_attn_scalar": 16, "num_hidden_layers": 7}


def changed(name: str, **settings: object) -> Checkpoint:
    return replace(CHECKPOINTS[name], settings=CHECKPOINTS[name].settings | settings)


LOCAL = {"rope_type": "default", "rope_theta": 100.0}
GLOBAL = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
GEMMA_3 = GEMMA | {"layer_types": None, "rope_parameters": {"sliding_attention": LOCAL, "full_attention": GLOBAL}}
CASES = CHECKPOINTS | {
    "mistral": changed("mistral", sliding_window=None),
    "qwen3": changed("qwen3", **FULL),
    "smollm3": changed("smollm3", no_rope_layer_interval=4),
    "gemma2": changed("gemma2", query_pre_attn_scalar=16),
    "gemma3": changed("gemma3", **GEMMA_3),
    "gemma3-images": changed("gemma3-images", **GEMMA_3),
    "mixtral": changed("mixtral", sliding_window=None),
    "qwen2_moe": changed("qwen2_moe", mlp_only_layers=None),
    "qwen3_moe": changed("qwen3_moe", decoder_sparse_step=1),
    "gpt_oss": Checkpoint("GptOss", GPT_OSS | {"swiglu_limit": 7.0}),
    "deepseek_v2": Checkpoint("DeepseekV2", DEEPSEEK_V2 | {"rope_parameters": SCALED}),
    "deepseek_v3": Checkpoint("DeepseekV3", DEEPSEEK_V3 | {"rope_parameters": SCALED}),
    "deepseek_v3-odd": changed("deepseek_v3-odd", rope_parameters=SCALED),
}
"""The checkpoints, without settings that GGUF files of their architecture cannot have."""
del CASES["qwen2-window"]
Files = Callable[[str], tuple[Path, Path, Any]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A function from a checkpoint's name to its folder, its GGUF file, and its model in transformers."""

    @cache
    def made(name: str) -> tuple[Path, Path, Any]:
        folder = tmp_path_factory.mktemp(name)
        model = CASES[name].write(folder)
        return folder, write_gguf(folder / f"{name}.gguf", folder, model, CASES[name].prefix), model

    return made


def comparable(config: ModelConfig) -> ModelConfig:
    """Return the configuration without values that files of the two formats store differently."""
    return replace(config, name="", architecture="", norm_offset=0.0, rope_scaling=None)


@pytest.mark.parametrize("name", CASES)
def test_the_file_has_the_configuration_and_the_tensors_of_the_folder(name: str, files: Files) -> None:
    folder, file, _ = files(name)
    theirs, ours = SafetensorsModel(folder), GgufModel(file)
    assert comparable(ours.config) == comparable(theirs.config)
    assert set(ours.shapes()) == set(theirs.shapes())
    for tensor in theirs.shapes():
        expected = theirs.read(tensor)
        if "norm" in tensor and ours.config.norm_offset != theirs.config.norm_offset:
            expected = expected + np.float32(1)
        np.testing.assert_array_equal(ours.read(tensor), expected, err_msg=tensor)


def test_every_architecture_is_tested() -> None:
    assert {file_architecture(name) for name in CASES} == set(ARCHITECTURES)


def file_architecture(name: str) -> str:
    return gguf.MODEL_ARCH_NAMES[FORMS[CASES[name].prefix].architecture]


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "gemma3", "granite", "gpt_oss", "deepseek_v2"])
@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_logits_and_tokens_are_those_of_transformers(name: str, kernels: str, files: Files) -> None:
    _, file, theirs = files(name)
    check(runner_for(file, kernels), theirs, [p for p in PROMPTS if len(p) > 64 or not is_long(name)], 24)


@pytest.mark.parametrize("name", ["mixtral", "phi3", "gemma3", "gpt_oss", "deepseek_v3"])
def test_a_flipped_byte_in_the_header_is_refused_or_leaves_a_usable_file(
    name: str, files: Files, tmp_path: Path
) -> None:
    data, flipped = bytearray(files(name)[1].read_bytes()), tmp_path / "flipped.gguf"
    whole = min(info.start for info in read_header(bytes(data), flipped).tensors.values())

    @settings(max_examples=150, deadline=None)
    @given(st.integers(0, whole - 1), st.integers(1, 255))
    def flip(place: int, bits: int) -> None:
        data[place] ^= bits
        flipped.write_bytes(data)
        data[place] ^= bits
        with contextlib.suppress(ModelFileError):
            source = open_model(str(flipped))
            for tensor in source.tensors.shapes():
                source.tensors.read(tensor)

    flip()


def test_a_model_in_several_files_is_opened_by_its_first_file(files: Files, tmp_path: Path) -> None:
    _, file, _ = files("qwen3")
    whole = GgufModel(file)
    parts = split(file, tmp_path, 3)
    model = GgufModel(parts[0])
    assert model.config == replace(whole.config, name="part")
    assert set(model.shapes()) == set(whole.shapes())
    for tensor in whole.shapes():
        np.testing.assert_array_equal(model.read(tensor), whole.read(tensor))
    model.release()
    digest = open_model(str(parts[0])).digest
    with pytest.raises(ModelFileError, match="Give the first file"):
        GgufModel(parts[1])
    data = parts[2].read_bytes()
    parts[2].write_bytes(bytes([*data[:-1], data[-1] ^ 1]))
    assert open_model(str(parts[0])).digest != digest
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(ModelFileError, match="is 1 instead of 2"):
        GgufModel(parts[0])
    parts[2].unlink()
    with pytest.raises(ModelFileError, match="cannot open"):
        GgufModel(parts[0])


def split(file: Path, folder: Path, count: int) -> list[Path]:
    """Write a file as `count` files, with the library."""
    reader = gguf.GGUFReader(file)
    paths = [folder / f"part-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "qwen3")
        for key, field in reader.fields.items():
            if number == 0 and not key.startswith("GGUF.") and key != "general.architecture":
                writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


CODED = {
    "attn_q": Kind.Q8_0,
    "attn_k": Kind.Q4_0,
    "attn_kv_a_mqa": Kind.Q8_0,
    "ffn_gate_exps": Kind.Q4_1,
    "ffn_up_exps": Kind.Q4_1,
    "ffn_gate_shexp": Kind.Q8_0,
}


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_quantized_experts_are_computed_as_the_library_dequantizes_them(
    name: str, files: Files, tmp_path: Path
) -> None:
    folder, _, model = files(name)
    kinds = CODED if name != "gpt_oss" else {**dict.fromkeys(CODED, Kind.MXFP4), "ffn_down_exps": Kind.MXFP4}
    file = write_gguf(tmp_path / "coded.gguf", folder, model, CASES[name].prefix, kinds)
    source = open_model(str(file))
    assert isinstance(source.tensors, GgufModel)
    stacks = {t.name: t for t in gguf.GGUFReader(file).tensors}
    stack = stacks["blk.1.ffn_up_exps.weight"]
    for expert, expected in enumerate(gguf.dequantize(stack.data, stack.tensor_type)):
        ours = source.tensors.read(f"model.layers.1.mlp.experts.{expert}.up_proj.weight")
        np.testing.assert_array_equal(ours, expected)
    logits = []
    for kernels in ("torch", "compiled"):
        built = build_model(source.config, source.tensors, dtype="float32", kernels=kernels)
        pages = PagedKv.allocate(KvLayout.of(source.config, block_tokens=16, dtype="float32"), 2)
        at = np.arange(9, dtype=np.int64)
        batch = StepBatch(at * 11, at, at, np.array([9]), np.array([9]), np.zeros((1, 1), np.int64), at)
        values = built.compute(batch, pages).values
        logits.append(np.stack([np.array(values[row]) for row in range(9)]))
    np.testing.assert_allclose(logits[1], logits[0], atol=2e-3 * logits[0].std())
