"""FP8 checkpoints in the manner of DeepSeek V3 (DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.3), and the
tensors of FP8 modules of all formats.

A module has weight [outputs, inputs] in e4m3 and weight_scale_inv [blocks of outputs, blocks of inputs] with
`weight_block_size`, or otherwise one weight_scale. value = scale * e4m3: despite its name, weight_scale_inv holds
multipliers.
"""

import numpy as np

from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.quantized.float8_matrix import Float8Matrix
from kvferry.weights.quantized.method import Method
from kvferry.weights.quantized.names import contains_any, name_list
from kvferry.weights.quantized.packed_words import FLOATS, ModuleTensors
from kvferry.weights.tensors import Shape

_SCALE_NAMES = ("weight_scale_inv", "weight_scale")


def read_float8(fields: ConfigFields) -> Method:
    """Read the fields of `quantization_config`.

    Raises:
        ModelFileError: a field has a value that is not supported.
    """
    if fields.value("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        fields.refuse("fmt", "only e4m3 is")
    if fields.value("activation_scheme") not in (None, "dynamic", "static"):
        fields.refuse("activation_scheme", "supported schemes: dynamic, static")
    if fields.value("scale_fmt") not in (None, "float"):
        fields.refuse("scale_fmt", "only float scales are")
    given = fields.value("weight_block_size")
    block: tuple[int, int] | None = None
    if given is not None:
        if not isinstance(given, list) or [type(size) for size in given] != [int, int] or min(given) < 1:
            fields.refuse("weight_block_size", "it must be two positive whole numbers")
        block = (given[0], given[1])
    skipped = (*name_list(fields, "modules_to_not_convert"), *name_list(fields, "ignored_layers"))
    title = "FP8, " + ("a scale per tensor" if block is None else f"blocks of {block[0]} x {block[1]}")

    def read(parts: ModuleTensors) -> Float8Matrix:
        name = next((name for name in _SCALE_NAMES if name in parts), _SCALE_NAMES[0])
        return float8_matrix(parts, name, block, title)

    return Method(
        "fp8",
        frozenset(_SCALE_NAMES),
        read,
        lambda module: contains_any(skipped, module),
        frozenset({"input_scale", "k_scale", "v_scale"}),
        ("activations are not rounded, although the checkpoint has an activation_scheme",),
    )


def float8_matrix(parts: ModuleTensors, scale_name: str, block: tuple[int, int] | None, title: str) -> Float8Matrix:
    """Describe the matrix of an FP8 module.

    Args:
        parts: tensors of the module.
        scale_name: name of the scales' tensor.
        block: outputs and inputs of a block; `None` for a scale per tensor or per output.
        title: readable name of the scheme.

    Raises:
        ModelFileError: a tensor is missing or has a wrong type or shape.
    """
    weight = parts.take("weight", ("F8_E4M3",))
    outputs, inputs = weight.shape
    shapes: list[Shape]
    if block is not None:
        shapes = [(-(-outputs // block[0]), -(-inputs // block[1]))]
    else:
        shapes = [(), (1,), (1, 1), (outputs, 1), (outputs,)]
    shape = next((shape for shape in shapes if parts.has_shape(scale_name, shape)), shapes[-1])
    scales = parts.take(scale_name, FLOATS, shape)
    if block is None:
        block = (1 if shape and shape[0] == outputs > 1 else outputs, inputs)
    columns = shape[1] if len(shape) > 1 else 1
    return Float8Matrix(
        (outputs, inputs),
        title,
        lambda: weight.raw().view(np.uint8),
        lambda: scales.values().reshape(-1, columns),
        block,
    )
