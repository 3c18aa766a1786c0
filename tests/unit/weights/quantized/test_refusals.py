"""Invalid quantized checkpoints are refused by field or tensor, with that error and no other."""

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.core.errors import ModelFileError
from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.files.safetensors_file import QUANTIZED_TYPES, StoredTensor, open_tensors
from kvferry.weights.quantized.checkpoint import METHODS, collect, read_method, without_idle_biases
from kvferry.weights.quantized.names import ModuleNames, contains_any

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "quantized"
WHERE = Path("config.json")


def case(name: str) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    path = GOLDEN / f"{name}.safetensors"
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    tensors = open_tensors(path, types=QUANTIZED_TYPES)
    del tensors["expected"]
    return json.loads(header["__metadata__"]["quantization_config"]), tensors


def read(config: object, tensors: dict[str, StoredTensor]) -> None:
    method = read_method({"quantization_config": config}, WHERE)
    assert method is not None
    for matrix in collect(method, tensors, "folder")[1].values():
        assert matrix.choice.line
        matrix.values()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("awq", {"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes' is not supported: use one of awq"),
        ("awq", {"quant_method": None}, "quant_method = None"),
        ("awq", {"bits": 3}, "bits = 3 is not supported: only 4 is"),
        ("awq", {"bits": "4"}, "bits must be a positive whole number"),
        ("awq", {"zero_point": False}, "zero_point = False"),
        ("awq", {"version": "gemv"}, "version = 'gemv' is not supported: only gemm is"),
        ("awq", {"group_size": 0}, "group_size must be a positive whole number"),
        ("awq", {"group_size": 48}, "64 inputs, not a multiple of group_size 48"),
        ("awq", {"group_size": 64}, r"scales of shape \[2, 32\] instead of \[1, 32\]"),
        ("awq", {"modules_to_not_convert": "m"}, "modules_to_not_convert = 'm'"),
        (
            "awq",
            {"modules_to_not_convert": ["m"]},
            "module 'm' is quantized .* although quantization_config excludes it",
        ),
        ("gptq", {"bits": 2}, "bits = 2 is not supported: only 4 and 8 are"),
        ("gptq", {"bits": 8}, "qzeros of shape|scales of shape"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format = True"),
        ("gptq", {"pack_dtype": "int16"}, "pack_dtype = 'int16'"),
        ("gptq", {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic = "),
        ("packed-group", {"format": "marlin-24"}, "format = 'marlin-24'"),
        ("packed-group", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config = "),
        ("packed-group", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config = "),
        ("packed-group", {"config_groups": {}}, "config_groups = "),
        ("packed-group", {"config_groups": {"W4A16": ["Linear"]}}, "W4A16 must be an object"),
        ("packed-group", {"config_groups": {"g": {"targets": ["Linear"]}}}, "weights = None"),
        ("packed-group", {"ignore": ["re:(a+)+b"]}, "ignore = .*repeats, none of a group"),
        ("packed-group", {"ignore": ["re:["]}, "is not valid"),
        ("packed-group", {"ignore": ["m"]}, "although quantization_config excludes it"),
        ("fp8-block", {"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size = \[128\]"),
        ("fp8-block", {"quant_method": "fp8", "weight_block_size": [16, 0]}, "weight_block_size"),
        ("fp8-block", {"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2'"),
        ("fp8-block", {"quant_method": "fp8", "scale_fmt": "ue8m0"}, "scale_fmt = 'ue8m0'"),
        ("fp8-block", {"quant_method": "fp8", "weight_block_size": [16, 16]}, r"instead of \[2, 4\]"),
    ],
)
def test_a_field_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    config, tensors = case(name)
    with pytest.raises(ModelFileError, match=message):
        read(config | changes, tensors)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_bits", 3),
        ("type", "mx"),
        ("dynamic", True),
        ("strategy", "token"),
        ("strategy", "block"),
        ("group_size", -3),
        ("symmetric", "yes"),
    ],
)
def test_a_field_of_a_group_is_refused_by_name(key: str, value: object) -> None:
    config, tensors = case("packed-group")
    config = copy.deepcopy(config)
    config["config_groups"]["group_0"]["weights"][key] = value
    with pytest.raises(ModelFileError, match="block_structure" if value == "block" else key):
        read(config, tensors)


@pytest.mark.parametrize("key", ["output_activations", "format"])
def test_unsupported_parts_of_a_group_are_refused_by_name(key: str) -> None:
    config, tensors = case("packed-group")
    config = copy.deepcopy(config)
    config["config_groups"]["group_0"][key] = {"num_bits": 8}
    with pytest.raises(ModelFileError, match=key):
        read(config, tensors)


@pytest.mark.parametrize(
    ("name", "missing"),
    [("awq", "qzeros"), ("gptq", "scales"), ("packed-group", "weight_shape"), ("fp8-block", "weight_scale")],
)
def test_a_missing_tensor_is_named(name: str, missing: str) -> None:
    config, tensors = case(name)
    del tensors[f"m.{missing}"]
    with pytest.raises(ModelFileError, match=f"module 'm' has no tensor '{missing}'|has {missing}"):
        read(config, tensors)


def changed(tensor: StoredTensor, values: np.ndarray) -> StoredTensor:
    """Return a tensor of the same type and shape with other values."""
    return StoredTensor(values.tobytes(), tensor.dtype, tensor.shape, 0)


def test_a_group_that_is_larger_than_the_inputs_takes_no_more_memory() -> None:
    config, tensors = case("gptq")
    for name in ("m.scales", "m.qzeros"):
        tensors[name] = tensors[name].rows(0, 1)
    tensors["m.g_idx"] = changed(tensors["m.g_idx"], np.zeros(tensors["m.g_idx"].shape, np.int32))
    read(config | {"group_size": 2**31 - 1}, tensors)


@pytest.mark.parametrize("bad", [-1, 2, 2**31 - 1])
def test_a_missing_group_is_refused(bad: int) -> None:
    config, tensors = case("gptq-desc-act")
    groups = tensors["m.g_idx"].raw().copy()
    groups[7] = bad
    tensors["m.g_idx"] = changed(tensors["m.g_idx"], groups)
    with pytest.raises(ModelFileError, match="g_idx with groups from"):
        read(config, tensors)


@pytest.mark.parametrize("shape", [[32, 65], [-32, 64], [32, 0], [2**40, 64]])
def test_a_weight_shape_that_does_not_fit_is_refused(shape: list[int]) -> None:
    config, tensors = case("packed-group")
    tensors["m.weight_shape"] = changed(tensors["m.weight_shape"], np.array(shape, np.int64))
    with pytest.raises(ModelFileError, match="weight_shape"):
        read(config, tensors)


def test_a_float_weight_beside_codes_and_stray_integers_are_refused() -> None:
    config, tensors = case("awq")
    weight = StoredTensor(bytes(64 * 32 * 4), "F32", (32, 64), 0)
    with pytest.raises(ModelFileError, match="module 'm' has a F32 weight beside qweight"):
        read(config, tensors | {"m.weight": weight})
    with pytest.raises(ModelFileError, match=r"tensor 'n\.bias' has type I32"):
        read(config, tensors | {"n.bias": StoredTensor(bytes(4), "I32", (1,), 0)})


def test_a_model_without_the_field_is_not_quantized() -> None:
    assert read_method({}, WHERE) is None
    assert read_method({"quantization_config": None}, WHERE) is None
    with pytest.raises(ModelFileError, match="quantization_config must be an object"):
        read_method({"quantization_config": [1]}, WHERE)


def test_groups_apply_by_name_before_class() -> None:
    config, tensors = case("packed-8bit")
    config = copy.deepcopy(config)
    eight = config["config_groups"]["group_0"]
    four = copy.deepcopy(eight)
    four["weights"]["num_bits"] = 4
    for targets in (["m"], ["re:^m$"]):
        config["config_groups"] = {"all": four, "one": eight | {"targets": targets}}
        read(config, tensors)
    config["config_groups"] = {"one": eight | {"targets": ["other"]}}
    with pytest.raises(ModelFileError, match="belongs to no group in config_groups"):
        read(config, tensors)


def test_activations_and_kv_schemes_are_noted() -> None:
    config, _ = case("packed-8bit")
    config = copy.deepcopy(config) | {"kv_cache_scheme": {"num_bits": 8}}
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    method = read_method({"quantization_config": config}, WHERE)
    assert method is not None
    assert [note.split()[0] for note in method.notes] == ["input_activations:", "kv_cache_scheme"]


def test_only_idle_biases_of_quantized_modules_are_dropped() -> None:
    zero, one = (StoredTensor(np.full(2, v, np.float32).tobytes(), "F32", (2,), 0) for v in (0, 1))
    matrices: Any = {"a.weight": None, "b.weight": None}
    found = without_idle_biases({"a.bias": zero, "b.bias": one, "c.bias": zero}, matrices, {})
    assert set(found) == {"b.bias", "c.bias"}
    assert "a.bias" in without_idle_biases({"a.bias": zero}, matrices, {"a.bias": ()})


def test_names_are_matched_exactly_or_by_the_start() -> None:
    fields = ConfigFields({"ignore": []}, "here")
    names = ModuleNames(fields, "ignore", ["lm_head", "re:.*mlp\\.gate$"])
    assert [names.has(m) for m in ("lm_head", "lm_head.x", "a.mlp.gate", "a.mlp.gate_proj")] == [
        True,
        False,
        True,
        False,
    ]
    assert contains_any(["mlp.gate"], "model.layers.0.mlp.gate")
    assert not contains_any(["mlp.gate"], "model.layers.0.mlp.gate_proj")
    slow = ["re:.*a.*b.*c.*d", "re:(?:a)b", "re:(a|b)*c", "re:(a)\\1"]
    for pattern in slow:
        with pytest.raises(ModelFileError, match="ignore"):
            ModuleNames(fields, "ignore", [pattern])


NAMES = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(allow_nan=True) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(name=st.sampled_from(NAMES), data=st.data())
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_junk_in_any_field_or_tensor_raises_the_documented_errors_only(name: str, data: st.DataObject) -> None:
    config, tensors = case(name)
    config = copy.deepcopy(config)
    inner = config
    while True:
        key = data.draw(st.sampled_from(sorted(inner)))
        if isinstance(inner[key], dict) and inner[key] and data.draw(st.booleans()):
            inner = inner[key]
            continue
        inner[key] = data.draw(JUNK)
        break
    if data.draw(st.booleans()):
        victim = data.draw(st.sampled_from(sorted(tensors)))
        old = tensors[victim]
        if data.draw(st.booleans()):
            shape = tuple(data.draw(st.lists(st.integers(0, 70), max_size=3)))
            kind = data.draw(st.sampled_from(QUANTIZED_TYPES))
            size = StoredTensor(b"", kind, shape, 0).num_bytes
            tensors[victim] = StoredTensor(
                data.draw(st.binary(min_size=size, max_size=size)) if size < 99 else bytes(size), kind, shape, 0
            )
        else:
            raw = data.draw(st.binary(min_size=1, max_size=8))
            tensors[victim] = StoredTensor((raw * old.num_bytes)[: old.num_bytes], old.dtype, old.shape, 0)
    with np.errstate(all="ignore"), contextlib.suppress(ModelFileError):
        read(config, tensors)


def test_every_method_is_tested() -> None:
    in_this_module = {case(name)[0]["quant_method"] for name in NAMES} | {"fp8"}
    assert in_this_module | {"mxfp4"} == set(METHODS)  # tested in test_mxfp4.py
