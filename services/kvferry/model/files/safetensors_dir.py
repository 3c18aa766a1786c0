"""Opens a Hugging Face folder as a model: config.json, one or more .safetensors files, tokenizer files.

A safetensors file is [ header bytes u64 LE ][ JSON ][ data ]; the JSON has each tensor's type, shape and range [begin,
end) in the data. The header is checked completely before data is used. Files are memory-mapped.
"""

import json
import math
import mmap
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import ModelFileError
from kvferry.model.config import ModelConfig
from kvferry.model.families.config_fields import Json
from kvferry.model.families.registry import family_of, read_config
from kvferry.model.files.regular_file import map_file, read_file
from kvferry.model.tensors import BF16, F16, F32, HEAD, Shape, Stored, check_shapes

_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_TYPE_IDS = {"F32": F32, "F16": F16, "BF16": BF16}
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_MAX_DIMENSIONS = 8
_ROTATED = re.compile(r"self_attn\.[qk]_(?:proj\.(?:weight|bias)|norm\.weight)$")
"""Tensors whose rows are values of queries or keys."""


@dataclass(frozen=True, slots=True)
class _Stored:
    data: mmap.mmap
    dtype: str
    shape: Shape
    start: int
    """Offset of the tensor's first byte in the file."""


class SafetensorsModel:
    """An open folder: `config` and, as a `TensorSource`, the weights. The files must not change while the folder is
    open."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        """
        Raises:
            ModelFileError: a file is missing or damaged, or the model is not supported.
        """
        self.path = folder
        raw = read_json(folder / "config.json")
        self.weight_files = _weight_files(folder)
        self._tensors: dict[str, _Stored] = {}
        for path in self.weight_files:
            for tensor, stored in _open(path).items():
                if tensor in self._tensors:
                    raise ModelFileError(f"{path}: tensor {tensor!r} is in more than one file of the folder")
                self._tensors[tensor] = stored
        generation = folder / "generation_config.json"
        self.config = read_config(
            raw,
            name or folder.resolve().name,
            folder / "config.json",
            read_json(generation) if generation.is_file() else None,
        )
        if family_of(raw, folder / "config.json").has_fused_tensors:
            self._tensors = _split(self._tensors, self.config)
        if self.config.tie_word_embeddings:
            self._tensors.pop(HEAD, None)  # some checkpoints duplicate the tied matrix
        # Old Llama checkpoints store the rotary frequencies, which are derived from the configuration.
        self._tensors = {n: t for n, t in self._tensors.items() if not n.endswith("rotary_emb.inv_freq")}
        check_shapes(self.config, self.shapes(), str(folder))

    def shapes(self) -> Mapping[str, Shape]:
        """Return the shape of every tensor by name."""
        return {name: stored.shape for name, stored in self._tensors.items()}

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Read a tensor as float32; return a read-only view of the file if the tensor is stored as F32."""
        order = self._order(name)
        return self._in_stored_order(name) if order is None else self._in_stored_order(name)[order]

    def _in_stored_order(self, name: str) -> npt.NDArray[np.float32]:
        stored = self._tensors[name]
        count = math.prod(stored.shape)
        if stored.dtype == "BF16":
            halves = np.frombuffer(stored.data, dtype="<u2", count=count, offset=stored.start)
            return (halves.astype(np.uint32) << 16).view(np.float32).reshape(stored.shape)
        kind = "<f4" if stored.dtype == "F32" else "<f2"
        values = np.frombuffer(stored.data, dtype=kind, count=count, offset=stored.start).reshape(stored.shape)
        return values.astype(np.float32, copy=False)

    def _order(self, name: str) -> npt.NDArray[np.int64] | None:
        """Return the stored row of each row of a tensor; `None` if the rows are stored in order."""
        return rotated_first(self.config, self._tensors[name].shape[0]) if _ROTATED.search(name) else None

    def stored(self, name: str) -> Stored:
        """Return the rows of a matrix, as stored in the file."""
        stored = self._tensors[name]
        count = math.prod(stored.shape) * _BYTES[stored.dtype]
        data = np.frombuffer(stored.data, dtype=np.uint8, count=count, offset=stored.start)
        order = self._order(name)
        if order is not None:
            return Stored(_TYPE_IDS[stored.dtype], data, order)
        return Stored.plain(_TYPE_IDS[stored.dtype], data, stored.shape[0])

    def release(self) -> None:
        """Unmap the files' resident pages from this process; the pages may stay in the page cache."""
        for data in {id(stored.data): stored.data for stored in self._tensors.values()}.values():
            data.madvise(mmap.MADV_DONTNEED)


def _split(tensors: dict[str, _Stored], config: ModelConfig) -> dict[str, _Stored]:
    """Return the tensors with fused projections as separate tensors, which are ranges of rows of the fused ones.
    Tensors whose shape does not fit are left for the shape check."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fused = {
        "qkv_proj.weight": (("q_proj", q), ("k_proj", kv), ("v_proj", kv)),
        "gate_up_proj.weight": (("gate_proj", config.intermediate_size), ("up_proj", config.intermediate_size)),
    }
    found: dict[str, _Stored] = {}
    for name, stored in tensors.items():
        room, _, last = name.rpartition(".weight")[0].rpartition(".")
        parts = fused.get(f"{last}.weight", ()) if name.endswith(".weight") else ()
        if not parts or len(stored.shape) != 2 or stored.shape[0] != sum(rows for _, rows in parts):
            found[name] = stored
            continue
        start = stored.start
        for part, rows in parts:
            found[f"{room}.{part}.weight"] = replace(stored, shape=(rows, stored.shape[1]), start=start)
            start += rows * stored.shape[1] * _BYTES[stored.dtype]
    return found


def rotated_first(config: ModelConfig, rows: int) -> npt.NDArray[np.int64] | None:
    """Return the stored row of each row of a query or key projection, so that rotary pairs are half a head apart.

    A partly rotated head stores the halves of its rotated values first: r0 .. r(n/2 - 1), r(n/2) .. r(n - 1), p0 ..
    p(m - 1). The engine rotates pairs (i, i + head_dim/2) of all heads, and its table has angle zero for pairs of plain
    values: r0 .. r(n/2 - 1), p0 .. p(m/2 - 1) | r(n/2) .. r(n - 1), p(m/2) .. p(m - 1). Scores do not depend on the
    order, as queries and keys share it.
    """
    if config.rotary_dim is None:
        return None
    half, turned = config.head_dim // 2, config.rotary_dim // 2
    plain = np.arange(config.rotary_dim, config.head_dim)
    head = np.concatenate(
        (np.arange(turned), plain[: half - turned], np.arange(turned, 2 * turned), plain[half - turned :])
    )
    order: npt.NDArray[np.int64] = (np.arange(0, rows, config.head_dim)[:, None] + head).reshape(-1)
    return order


def read_json(path: Path) -> Json:
    """Read a JSON object from a file of limited size.

    Raises:
        ModelFileError: the file is missing, too large, or not a JSON object.
    """
    try:
        value = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} contains a {type(value).__name__}; a JSON object is expected")
    return value


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files: a single file, or all files in the index. Reject names outside the folder."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise ModelFileError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
        return [single]
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ModelFileError(f"{index} has no weight_map")
    names = sorted({str(name) for name in table.values()})
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ModelFileError(f"{index} lists {name!r}, which is not a file in the folder")
    return [folder / name for name in names]


def _open(path: Path) -> dict[str, _Stored]:
    """Map a file and check its tensor table.

    Raises:
        ModelFileError: lengths, types, shapes or ranges are inconsistent.
    """
    data = map_file(path)

    def damaged(what: str) -> ModelFileError:
        return ModelFileError(f"{path} ({len(data)} bytes) is not a usable safetensors file: {what}. Download it again")

    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, len(data) - 8):
        raise damaged(f"a header of {length} bytes")
    try:
        table = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise damaged("its header is not JSON") from error
    if not isinstance(table, dict):
        raise damaged("its header is not an object")
    table.pop("__metadata__", None)
    tensors: dict[str, _Stored] = {}
    end = 0
    entries = [(name, *_entry(name, entry, damaged)) for name, entry in table.items()]
    for name, dtype, shape, begin, stop in sorted(entries, key=lambda e: (e[3], e[4])):
        if begin != end:
            raise damaged(f"tensor {name!r} begins at {begin}, where {end} is expected (a hole or an overlap)")
        end = stop
        tensors[name] = _Stored(data, dtype, shape, 8 + length + begin)
    if 8 + length + end != len(data):
        raise damaged(f"its tensors end at byte {8 + length + end}")
    return tensors


def _entry(name: str, entry: object, damaged: Callable[[str], ModelFileError]) -> tuple[str, Shape, int, int]:
    if not isinstance(entry, dict):
        raise damaged(f"tensor {name!r} is not described by an object")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BYTES:
        raise damaged(f"tensor {name!r} has type {dtype!r}; supported are {', '.join(_BYTES)}")
    if isinstance(shape, list) and len(shape) > _MAX_DIMENSIONS:
        raise damaged(f"tensor {name!r} has {len(shape)} dimensions")
    if not _are_sizes(shape) or not _are_sizes(span) or len(span) != 2:
        raise damaged(f"tensor {name!r} has shape {shape!r} and range {span!r}")
    if math.prod(shape) * _BYTES[dtype] != span[1] - span[0]:
        raise damaged(f"tensor {name!r} of shape {shape} and type {dtype} does not fill {span}")
    return dtype, tuple(shape), span[0], span[1]


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 60 for item in value)
