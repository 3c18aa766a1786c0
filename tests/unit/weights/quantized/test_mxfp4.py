"""MXFP4 experts: values are those of transformers' converter, kept codes are exact, and damaged tensors are refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.kernels.mxfp4_checkpoints import QUANTIZATION
from safetensors.torch import save_file
from unit.weights.quantized.test_kept_rows import decoded

from kvferry.core.errors import ModelFileError
from kvferry.weights.files.safetensors_file import QUANTIZED_TYPES, open_tensors
from kvferry.weights.quantized.checkpoint import collect, read_method
from kvferry.weights.quantized.mxfp4 import Mxfp4Matrix
from kvferry.weights.quantized.representation import Kept, QuantizedMatrix

WHERE = Path("config.json")
PREFIX = "model.layers.0.mlp.experts"
EXPERTS, HIDDEN, INNER = 3, 64, 32


def tensors_of(*, lowest: int = 110, highest: int = 130, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors of random blocks with scales from `lowest` to `highest`."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, outputs, inputs in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        shape = (EXPERTS, outputs, inputs // 32)
        found[f"{PREFIX}.{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        found[f"{PREFIX}.{name}_scales"] = torch.randint(
            lowest, highest + 1, shape, generator=generator, dtype=torch.uint8
        )
    return found


def read(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> dict[str, QuantizedMatrix]:
    save_file(tensors, folder / "model.safetensors")
    method = read_method({"quantization_config": json.loads(json.dumps(QUANTIZATION | config))}, WHERE)
    assert method is not None
    plain, matrices = collect(method, open_tensors(folder / "model.safetensors", types=QUANTIZED_TYPES), "folder")
    assert not plain
    return matrices


@pytest.mark.parametrize(("lowest", "highest", "kept"), [(104, 143, Kept.E2M1), (60, 200, Kept.E2M1_WIDE)])
def test_values_are_those_of_transformers_and_kept_exactly(
    lowest: int, highest: int, kept: Kept, tmp_path: Path
) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = tensors_of(lowest=lowest, highest=highest)
    found = read(tmp_path, tensors)
    assert len(found) == 3 * EXPERTS
    for stack, projections in {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.items():
        blocks, scales = tensors[f"{PREFIX}.{stack}_blocks"], tensors[f"{PREFIX}.{stack}_scales"]
        expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2).numpy()
        for expert in range(EXPERTS):
            for first, projection in enumerate(projections):
                matrix = found[f"{PREFIX}.{expert}.{projection}.weight"]
                assert isinstance(matrix, Mxfp4Matrix)
                wanted = expected[expert, first :: len(projections)]
                np.testing.assert_array_equal(matrix.values(), wanted)
                assert matrix.choice.kept is kept
                part = matrix.rows(5, 7)
                np.testing.assert_array_equal(part.values(), wanted[5:12])
    narrow = read(tmp_path, tensors_of(lowest=max(lowest, 110), highest=min(highest, 140), seed=1))
    matrix = narrow[f"{PREFIX}.1.up_proj.weight"]
    assert isinstance(matrix, Mxfp4Matrix)
    np.testing.assert_array_equal(decoded(matrix), matrix.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down_proj_scales": None}, "has no tensor 'down_proj_scales'"),
        ({"gate_up_proj_blocks": None}, "has no tensor 'gate_up_proj_blocks'"),
        ({"down_proj_scales": (EXPERTS, HIDDEN, 2)}, r"has down_proj_scales of shape \[3, 64, 2\] instead of \[3, 64"),
        ({"down_proj_blocks": (EXPERTS, HIDDEN, 1, 8)}, "has down_proj_blocks with 8 bytes per block instead of 16"),
        (
            {"down_proj_blocks": (EXPERTS, HIDDEN, 16)},
            r"down_proj_blocks of shape \[3, 64, 16\] instead of 4 dimensions",
        ),
        ({"down_proj_scales": 255}, r"has down_proj_scales with a scale of 255 \(NaN\)"),
        ({"gate_up_proj_scales": 253}, r"with a scale of 253 \(2\^126\); at most 252"),
        ({"down_proj_blocks": torch.float32}, "has down_proj_blocks of type F32 instead of U8"),
    ],
)
def test_damaged_tensors_are_refused_by_name(change: dict[str, object], message: str, tmp_path: Path) -> None:
    tensors = tensors_of()
    for part, value in change.items():
        name = f"{PREFIX}.{part}"
        if value is None:
            del tensors[name]
        elif isinstance(value, int):
            tensors[name][1, 2, 0] = value
        elif isinstance(value, tuple):
            tensors[name] = torch.zeros(value, dtype=torch.uint8)
        else:
            assert isinstance(value, torch.dtype)
            tensors[name] = tensors[name].to(value)
    with pytest.raises(ModelFileError, match=message):
        read(tmp_path, tensors)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dequantize": True}, "dequantize = True is not supported: remove the field"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert = 'lm_head'"),
        ({"modules_to_not_convert": ["model.layers.*.mlp"]}, "although quantization_config excludes it"),
    ],
)
def test_fields_that_contradict_are_refused(config: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        read(tmp_path, tensors_of(), **config)
