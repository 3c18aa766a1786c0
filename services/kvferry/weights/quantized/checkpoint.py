"""Reads `quantization_config` from a config.json, and collects the tensors of quantized modules into matrices."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from kvferry.core.errors import ModelFileError
from kvferry.weights.families.config_fields import ConfigFields, Json
from kvferry.weights.files.safetensors_file import FLOAT_TYPES, StoredTensor
from kvferry.weights.quantized.awq import read_awq
from kvferry.weights.quantized.compressed_tensors import read_compressed_tensors
from kvferry.weights.quantized.float8 import read_float8
from kvferry.weights.quantized.gptq import read_gptq
from kvferry.weights.quantized.method import Method
from kvferry.weights.quantized.mxfp4 import read_mxfp4
from kvferry.weights.quantized.packed_words import ModuleTensors
from kvferry.weights.quantized.representation import QuantizedMatrix

FIELD = "quantization_config"
METHODS: Mapping[str, Callable[[ConfigFields], Method]] = MappingProxyType(
    {
        "awq": read_awq,
        "gptq": read_gptq,
        "compressed-tensors": read_compressed_tensors,
        "fp8": read_float8,
        "mxfp4": read_mxfp4,
    }
)
"""Reader of each format, by `quant_method`."""
_WEIGHT, _BIAS = "weight", "bias"


def read_method(raw: Json, where: Path) -> Method | None:
    """Return the format of a checkpoint; `None` if it is not quantized.

    Args:
        raw: content of config.json.
        where: the file, for messages.

    Raises:
        ModelFileError: the format or one of its fields is not supported; the message contains the field.
    """
    given = ConfigFields(raw, where).inner(FIELD)
    if given is None:
        return None
    fields = ConfigFields(_object(raw), f"{where}: {FIELD}")
    name = fields.value("quant_method")
    if not isinstance(name, str) or name not in METHODS:
        fields.refuse("quant_method", f"use one of {', '.join(METHODS)}, or the model's 16-bit checkpoint")
    return METHODS[name](fields)


def _object(raw: Json) -> Json:
    found = raw[FIELD]
    assert isinstance(found, dict), "checked by ConfigFields.inner"
    return found


def collect(
    method: Method, tensors: Mapping[str, StoredTensor], where: str
) -> tuple[dict[str, StoredTensor], dict[str, QuantizedMatrix]]:
    """Split the tensors of a checkpoint into plain tensors and quantized matrices, both by the name of the weight.

    Args:
        method: the format.
        tensors: all tensors of the files.
        where: the folder, for messages.

    Raises:
        ModelFileError: tensors of a module are missing, or of a wrong type or shape, or contradict the fields.
    """
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in tensors.items():
        module, _, part = name.rpartition(".")
        if part in method.parts or (part == _WEIGHT and stored.dtype not in FLOAT_TYPES):
            modules.setdefault(module, {})[part] = stored
    plain: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        module, _, part = name.rpartition(".")
        if part in method.dropped or (module in modules and part in modules[module]):
            continue
        if part == _WEIGHT and module in modules:
            raise ModelFileError(
                f"{where}: module {module!r} has a {stored.dtype} weight beside {', '.join(sorted(modules[module]))}."
                " The file is damaged"
            )
        plain[name] = stored
    matrices: dict[str, QuantizedMatrix] = {}
    for module, parts in modules.items():
        if method.is_excluded(module):
            raise ModelFileError(
                f"{where}: module {module!r} is quantized ({', '.join(sorted(parts))}), although {FIELD} excludes it."
                " The file is damaged"
            )
        if method.read_many is not None:
            found = method.read_many(ModuleTensors(module, parts, where))
            matrices |= {f"{module}.{name}": matrix for name, matrix in found.items()}
        elif method.read is not None:
            matrices[f"{module}.{_WEIGHT}"] = method.read(ModuleTensors(module, parts, where))
    for name, stored in plain.items():
        if stored.dtype not in FLOAT_TYPES:
            raise ModelFileError(
                f"{where}: tensor {name!r} has type {stored.dtype}, but belongs to no quantized module"
            )
    return plain, matrices


def without_idle_biases(
    tensors: dict[str, StoredTensor], matrices: Mapping[str, QuantizedMatrix], expected: Mapping[str, object]
) -> dict[str, StoredTensor]:
    """Drop the zero biases that some quantizers write for quantized modules that have no bias in the model.

    Args:
        tensors: the plain tensors of the checkpoint by name.
        matrices: the quantized matrices by the name of their weight.
        expected: the tensors that the model's configuration requires, by name.
    """
    return {
        name: stored
        for name, stored in tensors.items()
        if not (
            name.endswith(f".{_BIAS}")
            and name not in expected
            and f"{name.removesuffix(_BIAS)}{_WEIGHT}" in matrices
            and not np.any(stored.raw())
        )
    }
