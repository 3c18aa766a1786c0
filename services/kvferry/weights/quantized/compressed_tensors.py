"""Checkpoints of compressed-tensors (llm-compressor): packed integers, int8 and FP8 weights.

A module with packed integers has weight_packed [outputs, inputs / 8], words of eight 4-bit (or four 8-bit) values of
inputs, weight_scale [outputs, groups], weight_shape, weight_zero_point packed along outputs (if asymmetric), and
weight_g_idx [inputs] (if groups are reordered). Otherwise its weight [outputs, inputs] is int8 or FP8. Quantized values
and zero points are signed; packed values are stored with half the range added. The value is scale * (q - zero) for a
quantized q.
"""

from dataclasses import dataclass

import numpy as np

from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.quantized.float8 import float8_matrix
from kvferry.weights.quantized.integer_matrix import Codes, Grouping, IntegerMatrix
from kvferry.weights.quantized.method import Method
from kvferry.weights.quantized.names import ModuleNames, name_list
from kvferry.weights.quantized.packed_words import FLOATS, ModuleTensors, unpack_words
from kvferry.weights.quantized.representation import QuantizedMatrix

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
_STRATEGIES = ("tensor", "channel", "group", "block")
_MAX_GROUPS = 256
_LINEAR = "Linear"
_INT, _FLOAT = "int", "float"
_PARTS = {"weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"}
_OF_ACTIVATIONS = {"input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "q_scale"}


@dataclass(frozen=True, slots=True)
class _Scheme:
    """Quantization of the weights of a group of modules."""

    is_float: bool
    bits: int
    strategy: str
    group: int | None
    """Inputs of a group; `None` without groups."""
    is_symmetric: bool
    block: tuple[int, int] | None
    """Outputs and inputs of a block; `None` without blocks."""
    title: str


def read_compressed_tensors(fields: ConfigFields) -> Method:
    """Read the fields of `quantization_config`.

    Raises:
        ModelFileError: a field has a value that is not supported.
    """
    if fields.value("format") not in _FORMATS:
        fields.refuse("format", f"supported formats: {', '.join(_FORMATS)}")
    for key in ("sparsity_config", "transform_config"):
        inner = fields.value(key)
        if inner and inner != {"format": "dense"}:
            fields.refuse(key, "use a checkpoint without it")
    groups = fields.inner("config_groups")
    given = fields.value("config_groups")
    if groups is None or not isinstance(given, dict) or not 0 < len(given) <= _MAX_GROUPS:
        fields.refuse("config_groups", f"it must be an object with 1 to {_MAX_GROUPS} groups")
    schemes: list[tuple[ModuleNames, _Scheme]] = []
    notes: set[str] = set()
    for name in given:
        group = groups.inner(str(name))
        if group is None:
            groups.refuse(str(name), "it must be an object")
        if group.value("output_activations"):
            group.refuse("output_activations", "only inputs and weights may be quantized")
        if group.value("format") is not None and group.value("format") not in _FORMATS:
            group.refuse("format", f"supported formats: {', '.join(_FORMATS)}")
        if group.value("input_activations"):
            notes.add("input_activations: activations are rounded to 8 bits only with --numerics fast")
        weights = group.inner("weights")
        if weights is None:
            group.refuse("weights", "it must be an object")
        schemes.append((ModuleNames(group, "targets", name_list(group, "targets")), _scheme(weights)))
    if fields.value("kv_cache_scheme"):
        notes.add("kv_cache_scheme is not applied: --dtype sets the type of the KV")
    ignored = ModuleNames(fields, "ignore", name_list(fields, "ignore"))
    return Method(
        "compressed-tensors",
        frozenset(_PARTS),
        lambda parts: _matrix(parts, _scheme_of(parts, schemes)),
        ignored.has,
        frozenset(_OF_ACTIVATIONS),
        tuple(sorted(notes)),
    )


def _scheme(weights: ConfigFields) -> _Scheme:
    kind, bits = weights.value("type") or _INT, weights.whole("num_bits")
    if kind not in (_INT, _FLOAT):
        weights.refuse("type", f"only {_INT} and {_FLOAT} are")
    if bits != 8 and not (kind == _INT and bits == 4):
        weights.refuse("num_bits", "only 4-bit or 8-bit int and 8-bit float are")
    if weights.value("dynamic"):
        weights.refuse("dynamic", "only weights with stored scales are")
    group, block = weights.value("group_size"), weights.value("block_structure")
    strategy = weights.value("strategy") or ("group" if isinstance(group, int) and group > 0 else "tensor")
    if strategy not in _STRATEGIES:
        weights.refuse("strategy", f"supported strategies: {', '.join(_STRATEGIES)}")
    sizes: tuple[int, int] | None = None
    if strategy == "block":
        if kind == _INT or not isinstance(block, list) or [type(b) for b in block] != [int, int] or min(block) < 1:
            weights.refuse("block_structure", "only two positive whole numbers with FP8 weights are")
        sizes = (block[0], block[1])
    title = f"compressed-tensors {kind} {bits}-bit, "
    title += f"groups of {group}" if strategy == "group" else f"a scale per {strategy}"
    return _Scheme(
        is_float=kind == _FLOAT,
        bits=bits,
        strategy=str(strategy),
        group=weights.whole("group_size") if strategy == "group" else None,
        is_symmetric=weights.flag("symmetric", default=True),
        block=sizes,
        title=title + ("" if weights.flag("symmetric", default=True) else ", asymmetric"),
    )


def _scheme_of(parts: ModuleTensors, schemes: list[tuple[ModuleNames, _Scheme]]) -> _Scheme:
    """Return the scheme of a module: of the first group that names it, or else of the first group for all linear
    modules."""
    for names, scheme in schemes:
        if names.has(parts.module):
            return scheme
    for names, scheme in schemes:
        if _LINEAR in names.exact:
            return scheme
    raise parts.damaged("belongs to no group in config_groups")


def _matrix(parts: ModuleTensors, scheme: _Scheme) -> QuantizedMatrix:
    if scheme.is_float:
        if scheme.strategy == "group":
            raise parts.damaged("has FP8 weights in groups, which are not supported")
        return float8_matrix(parts, "weight_scale", scheme.block, scheme.title)
    return _packed(parts, scheme) if "weight_packed" in parts else _plain(parts, scheme)


def _packed(parts: ModuleTensors, scheme: _Scheme) -> IntegerMatrix:
    words = parts.take("weight_packed", ("I32",))
    stored = [int(size) for size in parts.take("weight_shape", ("I64", "I32"), (2,)).raw()]
    outputs, inputs = stored
    a_word = 32 // scheme.bits
    if outputs != words.shape[0] or inputs < 1 or -(-inputs // a_word) != words.shape[1]:
        raise parts.damaged(f"has weight_shape {stored}, but weight_packed has shape {list(words.shape)}")
    groups = _groups(parts, scheme, inputs)
    load_zeros = None
    if not scheme.is_symmetric:
        zeros = parts.take("weight_zero_point", ("I32",), (-(-outputs // a_word), groups))

        def load_zeros() -> Codes:
            return unpack_words(np.ascontiguousarray(zeros.raw().T), scheme.bits).T[:outputs]

    scales = parts.take("weight_scale", FLOATS, (outputs, groups))
    return IntegerMatrix(
        (outputs, inputs),
        scheme.bits,
        _grouping(parts, scheme, inputs, groups),
        scheme.title,
        lambda: np.ascontiguousarray(unpack_words(words.raw(), scheme.bits)[:, :inputs]),
        scales.values,
        load_zeros,
    )


def _plain(parts: ModuleTensors, scheme: _Scheme) -> IntegerMatrix:
    weight = parts.take("weight", ("I8",))
    outputs, inputs = weight.shape
    middle = np.uint8(1 << 7)  # signed values become unsigned
    groups = _groups(parts, scheme, inputs)
    rows = 1 if scheme.strategy == "tensor" else outputs
    shape = (1,) if rows == 1 and groups == 1 and parts.has_shape("weight_scale", (1,)) else (rows, groups)
    scales = parts.take("weight_scale", FLOATS, shape)
    load_zeros = None
    if not scheme.is_symmetric:
        zeros = parts.take("weight_zero_point", ("I8",), shape)

        def load_zeros() -> Codes:
            found = zeros.raw().reshape(rows, groups).view(np.uint8) ^ middle
            return np.ascontiguousarray(np.broadcast_to(found, (outputs, groups)))

    return IntegerMatrix(
        (outputs, inputs),
        8,
        Grouping(scheme.group or inputs),
        scheme.title,
        lambda: weight.raw().view(np.uint8) ^ middle,
        lambda: np.ascontiguousarray(np.broadcast_to(scales.values().reshape(rows, groups), (outputs, groups))),
        load_zeros,
    )


def _groups(parts: ModuleTensors, scheme: _Scheme, inputs: int) -> int:
    """Return the number of quantization groups in a row of the matrix, one row per output."""
    if scheme.group is None:
        return 1
    if inputs % scheme.group:
        raise parts.damaged(f"has {inputs} inputs, not a multiple of group_size {scheme.group}")
    return inputs // scheme.group


def _grouping(parts: ModuleTensors, scheme: _Scheme, inputs: int, groups: int) -> Grouping:
    size = scheme.group or inputs
    if "weight_g_idx" not in parts:
        return Grouping(size)
    stored = parts.take("weight_g_idx", ("I32", "I64"), (inputs,)).raw().astype(np.int64)
    if stored.min() < 0 or stored.max() >= groups:
        raise parts.damaged(f"has weight_g_idx with groups from {stored.min()} to {stored.max()}; there are {groups}")
    return Grouping(size, None if np.array_equal(stored, np.arange(inputs) // size) else stored)
