"""Parses an untrusted GGUF header; checks every count, length and offset before use.

    [ "GGUF" ][ version u32 = 2 or 3 ][ tensors u64 ][ pairs u64 ]
    pairs x   [ key string ][ type u32 ][ value ]
    tensors x [ name string ][ dims u32 ][ extent u64 ] x dims [ type u32 ][ offset u64 ]
    padding to `general.alignment` (32), then the data; offsets are relative to the data's start

A string is [ bytes u64 ][ UTF-8 ]; all little-endian. Extents are stored innermost first. Format: the ggml project's
docs/gguf.md. The reader of the `gguf` library takes 2 s for a vocabulary of 49,152 and does not check counts; this
parser takes tens of milliseconds.

Memory: an array stays in the file until its values are used (`Array`), and the numbers of pairs, tensors and strings
    are limited. Parsing a header therefore takes at most a few times its size, for any counts in it.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import ModelFileError

Scalar = int | float | bool | str

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_MAX_DIMS = 4
_MAX_NAME_BYTES = 1024
_MAX_ALIGNMENT = 1 << 16
_MAX_PAIRS = 1 << 16
_MAX_TENSORS = 1 << 16
_MAX_STRINGS = 1 << 21
"""Longest array of strings; the largest vocabularies have 2^18 tokens and 2^19 merges."""
_MAX_STRING_BYTES = 16 << 20
"""Longest single string, for example a chat template."""

TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
"""(name, elements per block, bytes per block) by type id."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type, shape and file position of a tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the tensor, outermost dimension first."""
    type_id: int
    start: int
    """Offset of the tensor's first byte from the start of the file."""
    num_bytes: int

    @property
    def type_name(self) -> str:
        """Name of the tensor's type, for example `Q4_1`."""
        return TENSOR_TYPES[self.type_id][0]

    @property
    def block_bytes(self) -> int:
        """Bytes per quantization block."""
        return TENSOR_TYPES[self.type_id][2]

    @property
    def row_bytes(self) -> int:
        """Bytes of the innermost dimension."""
        _, block, num_bytes = TENSOR_TYPES[self.type_id]
        return self.shape[-1] // block * num_bytes


@dataclass(frozen=True, slots=True)
class Array:
    """An array in the header. Its values are read from the file on each use."""

    data: mmap.mmap | bytes
    """The whole file."""
    code: str
    """Type of the numbers, as in `struct`; `s` for strings."""
    count: int
    start: int
    """Offset of the first value from the start of the file."""

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"<array of {self.count} values>"

    def numbers(self) -> npt.NDArray[np.generic]:
        """Return the numbers, [count], as a read-only view of the file; empty for an array of strings."""
        count = 0 if self.code == "s" else self.count
        code = "B" if self.code in "s?" else self.code
        return np.frombuffer(self.data, dtype="<" + code, count=count, offset=self.start)

    def strings(self) -> list[str]:
        """Decode the strings; empty for an array of numbers.

        Raises:
            UnicodeDecodeError: a string is not UTF-8.
        """
        data, at, found = self.data, self.start, []
        unpack = _LENGTH.unpack_from
        for _ in range(self.count if self.code == "s" else 0):
            end = at + 8 + unpack(data, at)[0]
            found.append(data[at + 8 : end].decode("utf-8"))
            at = end
        return found


Value = Scalar | Array


@dataclass(frozen=True, slots=True)
class Header:
    """Key-value pairs and tensor table of a GGUF file."""

    pairs: dict[str, Value]
    tensors: dict[str, TensorInfo]


def read_header(data: mmap.mmap | bytes, path: Path) -> Header:
    """Parse and check the header; the returned tensors are within the file and do not overlap.

    Args:
        data: the whole file.
        path: the file's path, for error messages.

    Raises:
        ModelFileError: the file is truncated, damaged or not a supported GGUF version.
    """
    cursor = _Cursor(data, path)
    if cursor.take(4) != _MAGIC:
        raise cursor.damaged("it does not begin with GGUF")
    version = cursor.unpack("I")
    if version not in _VERSIONS:
        raise cursor.damaged(f"version {version} is not supported; supported versions: 2, 3")
    num_tensors, num_pairs = cursor.count(33, _MAX_TENSORS), cursor.count(13, _MAX_PAIRS)
    pairs: dict[str, Value] = {}
    for _ in range(num_pairs):
        key = cursor.string(_MAX_NAME_BYTES, "name")
        if key in pairs:
            raise cursor.damaged(f"key {key!r} appears twice")
        pairs[key] = cursor.value(key)
    raw = [_read_tensor(cursor) for _ in range(num_tensors)]
    return Header(pairs, _place(raw, cursor, pairs.get("general.alignment", 32)))


def _read_tensor(cursor: "_Cursor") -> TensorInfo:
    """Parse an entry of the tensor table; the result's `start` is still relative to the start of the data."""
    name = cursor.string(_MAX_NAME_BYTES, "name")
    num_dims = cursor.unpack("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.damaged(f"tensor {name!r} has {num_dims} dimensions; 1 to {_MAX_DIMS} are supported")
    extents = [cursor.unpack("Q") for _ in range(num_dims)]
    type_id = cursor.unpack("I")
    start = cursor.unpack("Q")
    if type_id not in TENSOR_TYPES:
        raise cursor.other_type(name, type_id)
    word, block, block_bytes = TENSOR_TYPES[type_id]
    if 0 in extents or extents[0] % block:
        raise cursor.damaged(f"tensor {name!r} has invalid dimensions {extents} for type {word}")
    num_bytes = math.prod(extents) // block * block_bytes
    return TensorInfo(name, tuple(reversed(extents)), type_id, start, num_bytes)


def _place(raw: list[TensorInfo], cursor: "_Cursor", alignment: Value) -> dict[str, TensorInfo]:
    """Convert offsets to file positions; check that tensors are within the file and do not overlap."""
    if isinstance(alignment, bool) or not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT:
        raise cursor.damaged(
            f"general.alignment must be a whole number from 1 to {_MAX_ALIGNMENT}, not {repr(alignment)[:40]}"
        )
    if alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment must be a power of two, not {alignment}")
    base = -(-cursor.position // alignment) * alignment
    placed: dict[str, TensorInfo] = {}
    end, previous = base, "the header"
    for info in sorted(raw, key=lambda t: t.start):
        start = base + info.start
        if info.start % alignment:
            raise cursor.damaged(f"tensor {info.name!r} begins at {info.start}, not a multiple of {alignment}")
        if start < end:
            raise cursor.damaged(f"tensor {info.name!r} overlaps {previous!r}")
        end, previous = start + info.num_bytes, info.name
        if end > cursor.size:
            raise cursor.damaged(f"tensor {info.name!r} ends at byte {end}; the file is cut short")
        if info.name in placed:
            raise cursor.damaged(f"tensor {info.name!r} appears twice")
        placed[info.name] = TensorInfo(info.name, info.shape, info.type_id, start, info.num_bytes)
    return placed


class _Cursor:
    """Read position in the header; raises instead of reading past the end of the file."""

    def __init__(self, data: mmap.mmap | bytes, path: Path) -> None:
        self._data = data
        self._path = path
        self.position = 0
        self.size = len(data)

    def damaged(self, what: str) -> ModelFileError:
        """Create an error with the file's path and size and the current position."""
        return ModelFileError(
            f"{self._path} ({self.size} bytes) is not a usable GGUF file: {what} (at byte {self.position})."
            " Download the file again"
        )

    def other_type(self, name: str, type_id: int) -> ModelFileError:
        """Create an error for a type that is not supported; the file is intact if GGUF has such a type."""
        from gguf.constants import GGMLQuantizationType

        known = ", ".join(word for word, _, _ in TENSOR_TYPES.values())
        try:
            word = GGMLQuantizationType(type_id).name
        except ValueError:
            return self.damaged(f"tensor {name!r} has unsupported type id {type_id}; supported types: {known}")
        return ModelFileError(
            f"{self._path} ({self.size} bytes): tensor {name!r} has type {word}, which is not supported; use a file of"
            f" another quantization, such as Q4_K_M. Supported types: {known}"
        )

    def skip(self, num_bytes: int) -> int:
        """Step over `num_bytes` without reading them, and return the offset of the first."""
        start, end = self.position, self.position + num_bytes
        if end > self.size:
            raise self.damaged(f"{num_bytes} more bytes are needed, but only {self.size - start} are left")
        self.position = end
        return start

    def take(self, num_bytes: int) -> bytes:
        start = self.skip(num_bytes)
        return self._data[start : start + num_bytes]

    def unpack(self, code: str) -> int:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return int(value)

    def count(self, min_bytes_each: int, limit: int | None = None) -> int:
        """Read a count, and check that it is at most `limit` and that this many entries of at least `min_bytes_each`
        bytes fit in the rest of the file."""
        number = self.unpack("Q")
        if number > (self.size - self.position) // min_bytes_each:
            raise self.damaged(f"its count of {number} entries exceeds the file's size")
        if limit is not None and number > limit:
            raise self.damaged(f"its count of {number} entries exceeds the limit of {limit}")
        return number

    def string(self, max_bytes: int, what: str) -> str:
        length = self.unpack("Q")
        if length > max_bytes:
            raise self.damaged(f"a {what} has {length} bytes; at most {max_bytes} are supported")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged("a string is not UTF-8") from None

    def value(self, key: str) -> Value:
        kind = self.unpack("I")
        if kind != _ARRAY:
            return self._scalar(kind, key)
        element = self.unpack("I")
        if element == _STRING:
            return self._strings()
        if element not in _SCALARS:
            raise self.damaged(f"key {key!r} is an array of type {element}")
        code = _SCALARS[element]
        size = struct.calcsize("<" + code)
        number = self.count(size)
        return Array(self._data, code, number, self.skip(number * size))

    def _scalar(self, kind: int, key: str) -> Scalar:
        if kind == _STRING:
            return self.string(_MAX_STRING_BYTES, "string")
        if kind not in _SCALARS:
            raise self.damaged(f"key {key!r} has type {kind}")
        (value,) = struct.unpack("<" + _SCALARS[kind], self.take(struct.calcsize("<" + _SCALARS[kind])))
        scalar: Scalar = value
        return scalar

    def _strings(self) -> Array:
        """Step over an array of strings in a single loop without calls, since a vocabulary has 10^5 strings."""
        number = self.count(8, _MAX_STRINGS)
        data, start, size = self._data, self.position, self.size
        unpack = _LENGTH.unpack_from
        at = start
        for index in range(number):
            if at + 8 > size or (at := at + 8 + unpack(data, at)[0]) > size:
                raise self.damaged(f"string {index} of {number} is cut short")
        self.position = at
        return Array(data, "s", number, start)
