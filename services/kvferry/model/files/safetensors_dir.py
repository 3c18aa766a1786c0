"""Opens a Hugging Face folder as a model: config.json, one or more .safetensors files, tokenizer files."""

import json
import mmap
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import ModelFileError
from kvferry.model.config import ModelConfig
from kvferry.model.families.config_fields import Json
from kvferry.model.families.registry import family_of, read_config
from kvferry.model.files.regular_file import read_file
from kvferry.model.files.safetensors_file import StoredTensor, open_tensors
from kvferry.model.tensors import BF16, F16, F32, HEAD, Shape, Stored, check_shapes

_TYPE_IDS = {"F32": F32, "F16": F16, "BF16": BF16}
_ROTATED = re.compile(r"self_attn\.[qk]_(?:proj\.(?:weight|bias)|norm\.weight)$")
"""Tensors whose rows are values of queries or keys."""


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
        self._tensors: dict[str, StoredTensor] = {}
        for path in self.weight_files:
            for tensor, stored in open_tensors(path).items():
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
        values = self._tensors[name].values()
        return values if order is None else values[order]

    def _order(self, name: str) -> npt.NDArray[np.int64] | None:
        """Return the stored row of each row of a tensor; `None` if the rows are stored in order."""
        return rotated_first(self.config, self._tensors[name].shape[0]) if _ROTATED.search(name) else None

    def stored(self, name: str) -> Stored:
        """Return the rows of a matrix, as stored in the file."""
        stored = self._tensors[name]
        data = np.frombuffer(stored.data, dtype=np.uint8, count=stored.num_bytes, offset=stored.start)
        order = self._order(name)
        if order is not None:
            return Stored(_TYPE_IDS[stored.dtype], data, order)
        return Stored.plain(_TYPE_IDS[stored.dtype], data, stored.shape[0])

    def release(self) -> None:
        """Unmap the files' resident pages from this process; the pages may stay in the page cache."""
        for data in {id(stored.data): stored.data for stored in self._tensors.values()}.values():
            data.madvise(mmap.MADV_DONTNEED)


def _split(tensors: dict[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the tensors with fused projections as separate tensors, which are ranges of rows of the fused ones.
    Tensors whose shape does not fit are left for the shape check."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fused = {
        "qkv_proj.weight": (("q_proj", q), ("k_proj", kv), ("v_proj", kv)),
        "gate_up_proj.weight": (("gate_proj", config.intermediate_size), ("up_proj", config.intermediate_size)),
    }
    found: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        room, _, last = name.rpartition(".weight")[0].rpartition(".")
        parts = fused.get(f"{last}.weight", ()) if name.endswith(".weight") else ()
        if not parts or len(stored.shape) != 2 or stored.shape[0] != sum(rows for _, rows in parts):
            found[name] = stored
            continue
        start = stored.start
        for part, rows in parts:
            found[f"{room}.{part}.weight"] = replace(stored, shape=(rows, stored.shape[1]), start=start)
            start += rows * stored.row_bytes
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
