"""Modules that the formats' own libraries wrote (compressed-tensors 0.20, AutoAWQ 0.2.9, GPTQModel 7.7), with the
weights that the libraries dequantized them to."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.weights.files.safetensors_file import QUANTIZED_TYPES, open_tensors
from kvferry.weights.quantized.checkpoint import collect, read_method
from kvferry.weights.quantized.representation import Kept, QuantizedMatrix

FILES = sorted((Path(__file__).resolve().parents[3] / "golden" / "quantized").glob("*.safetensors"))
KEPT = {
    "awq": Kept.CODES4_WIDE,
    "fp8-block": Kept.BFLOAT16,
    "fp8-channel": Kept.BFLOAT16,
    "fp8-tensor": Kept.BFLOAT16,
    "gptq": Kept.CODES4,
    "gptq-8bit": Kept.CODES8,
    "gptq-asymmetric-v2": Kept.CODES4_WIDE,
    "gptq-channel-asymmetric": Kept.CODES4_WIDE,
    "gptq-desc-act": Kept.FLOAT16,
    "int8-channel": Kept.CODES8,
    "packed-8bit": Kept.CODES8,
    "packed-channel-asymmetric": Kept.CODES4_WIDE,
    "packed-group": Kept.CODES4,
    "packed-group-asymmetric": Kept.CODES4_WIDE,
}


def read(path: Path) -> tuple[QuantizedMatrix, npt.NDArray[np.float32]]:
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    config = json.loads(header["__metadata__"]["quantization_config"])
    tensors = open_tensors(path, types=QUANTIZED_TYPES)
    expected = tensors.pop("expected").values()
    method = read_method({"quantization_config": config}, path)
    assert method is not None
    plain, matrices = collect(method, tensors, str(path))
    assert not plain
    return matrices["m.weight"], expected


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_weights_are_those_of_the_library(path: Path) -> None:
    matrix, expected = read(path)
    values = matrix.values()
    if path.stem.startswith("gptq"):  # AutoAWQ dequantizes in float16
        values = values.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(matrix.rows(5, 9).values(), matrix.values()[5:14])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_smallest_exact_representation_is_chosen(path: Path) -> None:
    choice = read(path)[0].choice
    assert choice.kept is KEPT[path.stem]
    candidates = list(Kept)
    passed = [kept for kept, _ in choice.passed_over]
    assert all(reason for _, reason in choice.passed_over)
    assert passed == [kept for kept in candidates[: candidates.index(choice.kept)] if kept in passed]
    assert choice.kept.title in choice.line


def test_every_file_is_tested() -> None:
    assert {path.stem for path in FILES} == set(KEPT)
