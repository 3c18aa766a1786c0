"""GPTQ checkpoints (Frantar et al., GPTQ, 2023; AutoGPTQ and GPTQModel).

A module has qweight [inputs / 8, outputs], words of eight 4-bit (or four 8-bit) values of inputs, scales [groups,
outputs], qzeros [groups, outputs / 8] and g_idx [inputs], the group of each input. For a quantized q, the value is
scale * (q - zero). The stored zero points are one less than the actual zero points, except in version 2 of the layout.
"""

import numpy as np

from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.quantized.awq import group_size, group_title
from kvferry.weights.quantized.integer_matrix import Codes, Grouping, IntegerMatrix
from kvferry.weights.quantized.method import Method
from kvferry.weights.quantized.names import contains_any, name_list
from kvferry.weights.quantized.packed_words import FLOATS, ModuleTensors, unpack_words

_LAYOUTS = {"gptq": True, "gptq_v2": False}
"""Whether stored zero points are one less than the real ones."""


def read_gptq(fields: ConfigFields) -> Method:
    """Read the fields of `quantization_config`.

    Raises:
        ModelFileError: a field has a value that is not supported.
    """
    bits = fields.whole("bits")
    if bits not in (4, 8):
        fields.refuse("bits", "only 4 and 8 are")
    if fields.value("pack_dtype") not in (None, "int32"):
        fields.refuse("pack_dtype", "only int32 is")
    if fields.flag("is_marlin_format"):
        fields.refuse("is_marlin_format", "convert the checkpoint to the layout gptq")
    key = "checkpoint_format" if fields.value("checkpoint_format") is not None else "format"
    layout = fields.value(key) or "gptq"
    if layout not in tuple(_LAYOUTS):  # any JSON value
        fields.refuse(key, f"supported layouts: {', '.join(_LAYOUTS)}")
    overrides = fields.value("dynamic")
    if overrides and not (isinstance(overrides, dict) and all(str(name).startswith("-:") for name in overrides)):
        fields.refuse("dynamic", "it can exclude modules (-:), but not quantize them differently")
    group, reorders = group_size(fields), fields.flag("desc_act")
    skipped = name_list(fields, "modules_to_not_convert")
    scheme = f"GPTQ {bits}-bit, {group_title(group)}{', desc_act' if reorders else ''}"
    is_less = _LAYOUTS[str(layout)]
    return Method(
        "gptq",
        frozenset({"qweight", "qzeros", "scales", "g_idx"}),
        lambda parts: _matrix(parts, bits, group, is_less, scheme),
        lambda module: contains_any(skipped, module),
    )


def _matrix(parts: ModuleTensors, bits: int, group: int | None, is_less: bool, scheme: str) -> IntegerMatrix:
    a_word = 32 // bits
    words = parts.take("qweight", ("I32",))
    inputs, outputs = words.shape[0] * a_word, words.shape[1]
    size = min(group or inputs, inputs)
    groups = -(-inputs // size)
    if outputs % a_word:
        raise parts.damaged(f"has {outputs} outputs, not a multiple of {a_word}")
    scales = parts.take("scales", FLOATS, (groups, outputs))
    zeros = parts.take("qzeros", ("I32",), (groups, outputs // a_word))
    of_input = None
    if "g_idx" in parts:
        stored = parts.take("g_idx", ("I32", "I64"), (inputs,)).raw().astype(np.int64)
        if stored.min() < 0 or stored.max() >= groups:
            raise parts.damaged(f"has g_idx with groups from {stored.min()} to {stored.max()}; there are {groups}")
        if not np.array_equal(stored, np.arange(inputs) // size):
            of_input = stored

    def load_zeros() -> Codes:
        found = zeros.raw().view(np.uint32)
        if is_less:  # whole words, since subtracting 1 from a zero point of 0 borrowed from the next one
            found = found + np.uint32(sum(1 << place for place in range(0, 32, bits)))
        return np.ascontiguousarray(unpack_words(found, bits).T)

    return IntegerMatrix(
        (outputs, inputs),
        bits,
        Grouping(size, of_input),
        scheme,
        lambda: unpack_words(np.ascontiguousarray(words.raw().T), bits),
        lambda: np.ascontiguousarray(scales.values().T),
        load_zeros,
    )
