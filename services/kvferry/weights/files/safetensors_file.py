"""Reads a .safetensors file: the table of its tensors, and their values.

A file is [ header bytes u64 LE ][ JSON ][ data ]; the JSON has each tensor's type, shape and range [begin, end) in the
data. The header is checked completely before data is used. The file is memory-mapped.
"""

import json
import math
import mmap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import ModelFileError
from kvferry.weights.files.regular_file import map_file
from kvferry.weights.tensors import Shape

FLOAT_TYPES = ("F32", "F16", "BF16")
QUANTIZED_TYPES = (*FLOAT_TYPES, "F8_E4M3", "I8", "U8", "I32", "I64")
"""Types of tensors of a quantized checkpoint."""
_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8, "BOOL": 1}
_NUMPY = {
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F8_E4M3": "u1",
    "I8": "i1",
    "U8": "u1",
    "I32": "<i4",
    "I64": "<i8",
    "BOOL": "u1",
}
MAX_HEADER_BYTES = 100 << 20
"""Largest header that the format allows."""
_MAX_DIMENSIONS = 8
_MAX_FIELDS = 1 << 20
"""Most fields of a header, of which a tensor has four; parsing takes seconds and a kilobyte per tensor."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a mapped file."""

    data: mmap.mmap
    dtype: str
    shape: Shape
    start: int
    """Offset of the tensor's first byte in the file."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return math.prod(self.shape) * _BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes per index of the first dimension."""
        return math.prod(self.shape[1:]) * _BYTES[self.dtype]

    def rows(self, first: int, count: int) -> "StoredTensor":
        """Return the tensor restricted to a range of indices of the first dimension.

        Args:
            first: first index.
            count: number of indices; `first` + `count` is at most the length of the dimension.
        """
        return replace(self, shape=(count, *self.shape[1:]), start=self.start + first * self.row_bytes)

    def raw(self) -> npt.NDArray[np.generic]:
        """Return a read-only view of the file; types that numpy lacks are integers of the same size."""
        count = math.prod(self.shape)
        found = np.frombuffer(self.data, dtype=_NUMPY[self.dtype], count=count, offset=self.start)
        return found.reshape(self.shape)

    def values(self) -> npt.NDArray[np.float32]:
        """Read the values of a float type as float32; a read-only view of the file if they are stored as F32."""
        return as_float32(self.raw(), self.dtype)


_OTHER_TYPES = frozenset(
    {"BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "F16", "BF16", "F32", "F64", "C64", "F4"}
    | {"F6_E2M3", "F6_E3M2", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
)
"""Types of the format (safetensors 0.8); a file with one of them is intact."""


def as_float32(raw: npt.NDArray[np.generic], dtype: str) -> npt.NDArray[np.float32]:
    """Convert the raw values of a float type, as `StoredTensor.raw` returns them; float32 is not copied."""
    if dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32, copy=False)


def open_tensors(
    path: Path,
    max_header_bytes: int = MAX_HEADER_BYTES,
    types: Sequence[str] = FLOAT_TYPES,
    read: Callable[[Path], mmap.mmap] = map_file,
) -> dict[str, StoredTensor]:
    """Map a file and check its tensor table.

    Args:
        path: the file.
        max_header_bytes: largest header; its JSON is parsed as a whole.
        types: types that tensors may have.
        read: maps the file, or reads it.

    Raises:
        ModelFileError: lengths, types, shapes or ranges are inconsistent.
    """
    data = read(path)

    def damaged(what: str) -> ModelFileError:
        return ModelFileError(f"{path} ({len(data)} bytes) is not a usable safetensors file: {what}. Download it again")

    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= length <= min(max_header_bytes, len(data) - 8):
        raise damaged(
            f"its header has {length} bytes; it must have 2 to {max(2, min(max_header_bytes, len(data) - 8))}"
        )
    head = data[8 : 8 + length]
    if head.count(b":") > _MAX_FIELDS:
        raise damaged(f"its header has more than {_MAX_FIELDS} fields")
    try:
        table = json.loads(head, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise damaged(f"its header is not JSON ({error})") from error
    if not isinstance(table, dict):
        raise damaged("its header is not an object")
    table.pop("__metadata__", None)
    tensors: dict[str, StoredTensor] = {}
    end = 0
    entries = [(name, *_entry(name, entry, types, damaged)) for name, entry in table.items()]
    for name, dtype, shape, begin, stop in sorted(entries, key=lambda e: (e[3], e[4])):
        if begin != end:
            raise damaged(f"tensor {name!r} begins at {begin} instead of {end} (a hole or an overlap)")
        end = stop
        tensors[name] = StoredTensor(data, dtype, shape, 8 + length + begin)
    if 8 + length + end != len(data):
        raise damaged(f"its tensors end at byte {8 + length + end}, not at the end of the file")
    return tensors


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of the header.

    Raises:
        ValueError: a key appears twice.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {twice[:80]!r} appears twice")
    return found


def _entry(
    name: str, entry: object, types: Sequence[str], damaged: Callable[[str], ModelFileError]
) -> tuple[str, Shape, int, int]:
    if not isinstance(entry, dict):
        raise damaged(f"tensor {name!r} is not described by an object")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if isinstance(dtype, str) and dtype in _OTHER_TYPES and dtype not in types:
        raise ModelFileError(
            f"tensor {name!r} of a safetensors file has type {dtype}, which is not supported here; supported types:"
            f" {', '.join(types)}. Use a checkpoint with these types, or remove the tensor if the model does not use it"
        )
    if not isinstance(dtype, str) or dtype not in types:
        raise damaged(f"tensor {name!r} has type {dtype!r}; use one of {', '.join(types)}")
    if isinstance(shape, list) and len(shape) > _MAX_DIMENSIONS:
        raise damaged(f"tensor {name!r} has {len(shape)} dimensions; at most {_MAX_DIMENSIONS} are supported")
    if not _are_sizes(shape):
        raise damaged(f"tensor {name!r} has shape {shape!r}, which must be a list of whole numbers of at least 0")
    if not _are_sizes(span) or len(span) != 2:
        raise damaged(f"tensor {name!r} has data_offsets {span!r}, which must be two whole numbers of at least 0")
    if math.prod(shape) * _BYTES[dtype] != span[1] - span[0]:
        raise damaged(f"tensor {name!r} of shape {shape} and type {dtype} does not fill {span}")
    return dtype, tuple(shape), span[0], span[1]


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 60 for item in value)
