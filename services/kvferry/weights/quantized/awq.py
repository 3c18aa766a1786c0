"""AWQ checkpoints in the layout `gemm` (Lin et al., AWQ: Activation-aware Weight Quantization, 2024; AutoAWQ).

A module has qweight [inputs, outputs / 8] and qzeros [groups, outputs / 8], words of eight 4-bit values of outputs in
the order 0 2 4 6 1 3 5 7, and scales [groups, outputs]. A quantized value q stands for scale * (q - zero).
"""

import numpy as np

from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.quantized.integer_matrix import Grouping, IntegerMatrix
from kvferry.weights.quantized.method import Method
from kvferry.weights.quantized.names import contains_any, name_list
from kvferry.weights.quantized.packed_words import FLOATS, ModuleTensors, unpack_words

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_BITS = 4


def read_awq(fields: ConfigFields) -> Method:
    """Read the fields of `quantization_config`.

    Raises:
        ModelFileError: a field has a value that is not supported.
    """
    if fields.whole("bits") != _BITS:
        fields.refuse("bits", "only 4 is")
    if not fields.flag("zero_point", default=True):
        fields.refuse("zero_point", "only quantization with zero points is")
    if str(fields.value("version") or "gemm").lower() != "gemm":
        fields.refuse("version", "only gemm is")
    group = group_size(fields)
    skipped = name_list(fields, "modules_to_not_convert")
    scheme = f"AWQ 4-bit, {group_title(group)}"
    return Method(
        "awq",
        frozenset({"qweight", "qzeros", "scales"}),
        lambda parts: _matrix(parts, group, scheme),
        lambda module: contains_any(skipped, module),
    )


def group_size(fields: ConfigFields) -> int | None:
    """Return `group_size`; `None` for -1, which means one group for all inputs.

    Raises:
        ModelFileError: the field is neither -1 nor a positive whole number.
    """
    return None if fields.value("group_size") == -1 else fields.whole("group_size", 128)


def group_title(group: int | None) -> str:
    """Return a readable description of the group size.

    Args:
        group: number of inputs per scale; `None` for one scale per output.
    """
    return "a scale per output" if group is None else f"groups of {group}"


def _matrix(parts: ModuleTensors, group: int | None, scheme: str) -> IntegerMatrix:
    words = parts.take("qweight", ("I32",))
    inputs, outputs = words.shape[0], words.shape[1] * 8
    size = group or inputs
    if inputs % size:
        raise parts.damaged(f"has {inputs} inputs, not a multiple of group_size {size}")
    scales = parts.take("scales", FLOATS, (inputs // size, outputs))
    zeros = parts.take("qzeros", ("I32",), (inputs // size, outputs // 8))
    return IntegerMatrix(
        (outputs, inputs),
        _BITS,
        Grouping(size),
        scheme,
        lambda: np.ascontiguousarray(unpack_words(words.raw(), _BITS, _ORDER).T),
        lambda: np.ascontiguousarray(scales.values().T),
        lambda: np.ascontiguousarray(unpack_words(zeros.raw(), _BITS, _ORDER).T),
    )
