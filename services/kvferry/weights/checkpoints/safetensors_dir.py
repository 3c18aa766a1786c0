"""Opens a Hugging Face folder as a model: config.json, one or more .safetensors files, tokenizer files."""

import json
import logging
import mmap
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import ModelFileError
from kvferry.weights.checkpoints.pickled import CONVERT, is_pickled
from kvferry.weights.config import ModelConfig
from kvferry.weights.families.config_fields import Json
from kvferry.weights.families.registry import family_of, read_config
from kvferry.weights.families.text_part import left_out
from kvferry.weights.files.regular_file import is_present, read_file
from kvferry.weights.files.row_orders import stored_rows
from kvferry.weights.files.safetensors_file import FLOAT_TYPES, QUANTIZED_TYPES, StoredTensor, open_tensors
from kvferry.weights.files.stacked_experts import ExpertTensor, split_experts
from kvferry.weights.quantized.checkpoint import FIELD, collect, read_method, without_idle_biases
from kvferry.weights.quantized.grouped import GroupedCodes
from kvferry.weights.quantized.representation import MatrixChoice, QuantizedMatrix, report
from kvferry.weights.tensors import BF16, EMBEDDING, F16, F32, HEAD, Shape, Stored, check_shapes, expected_shapes

_log = logging.getLogger(__name__)
_SINGLE = "model.safetensors"
_TYPE_IDS = {"F32": F32, "F16": F16, "BF16": BF16}
_HEAD = f"{HEAD.rpartition('.')[0]}."
_COMPARED_BYTES = 16 << 20
_LAYER = re.compile(r"^model\.layers\.(\d{1,9})\.")


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
        method = read_method(raw, folder / "config.json")
        family = family_of(raw, folder / "config.json")
        found: dict[str, StoredTensor] = {}
        others: dict[str, int] = {}
        for path in self.weight_files:
            for name_in_file, stored in open_tensors(path, types=QUANTIZED_TYPES if method else FLOAT_TYPES).items():
                part = left_out(name_in_file) if family.text is not None else None
                if part is not None:
                    others[part] = others.get(part, 0) + stored.num_bytes
                    continue
                tensor = family.renamed(name_in_file)
                if tensor in found:
                    raise ModelFileError(f"{path}: tensor {tensor!r} is in more than one file of the folder")
                found[tensor] = stored
        self._files = {id(stored.data): stored.data for stored in found.values()}
        generation = folder / "generation_config.json"
        self.config = read_config(
            {field: value for field, value in raw.items() if field != FIELD},
            name or folder.resolve().name,
            folder / "config.json",
            read_json(generation) if is_present(generation) else None,
            has_head=any(tensor.startswith(_HEAD) for tensor in found),
        )
        self._matrices: dict[str, QuantizedMatrix] = {}
        self._notes: tuple[str, ...] = tuple(
            f"{part} is left out ({size / (1 << 20):.1f} MiB): only the text part of the model is served"
            for part, size in others.items()
        )
        if method:
            found, self._matrices = collect(method, found, str(folder))
            found = without_idle_biases(found, self._matrices, expected_shapes(self.config))
            self._notes += method.notes
        self._tensors: dict[str, StoredTensor | ExpertTensor] = {**found}
        if family.has_stacked_experts and self.config.experts is not None:
            plain, of_experts = split_experts(found, self.config.experts, self.config.num_layers)
            self._tensors = {**plain, **of_experts}
        if family.has_fused_tensors:
            self._tensors = {**_split(found, self.config)}
            self._matrices = _split(self._matrices, self.config)
        if self.config.tie_word_embeddings and HEAD in found | self._matrices:
            if _are_equal(found.get(HEAD), found.get(EMBEDDING)):
                del self._tensors[HEAD]  # some checkpoints duplicate the tied matrix
            else:  # transformers uses the head too
                self.config = replace(self.config, tie_word_embeddings=False)
        # Old Llama checkpoints store the rotary frequencies, which are derived from the configuration.
        self._tensors = {n: t for n, t in self._tensors.items() if not n.endswith("rotary_emb.inv_freq")}
        if family.ignores_further_layers:
            self._tensors = {n: t for n, t in self._tensors.items() if not self._is_further(n)}
            self._matrices = {n: m for n, m in self._matrices.items() if not self._is_further(n)}
        check_shapes(self.config, self.shapes(), str(folder))

    def _is_further(self, name: str) -> bool:
        """Return whether a tensor belongs to a layer beyond those of the configuration."""
        found = _LAYER.match(name)
        return found is not None and int(found[1]) >= self.config.num_layers

    def shapes(self) -> Mapping[str, Shape]:
        """Return the shape of every tensor by name."""
        return {name: stored.shape for name, stored in (self._tensors | self._matrices).items()}

    def choices(self) -> Mapping[str, MatrixChoice]:
        """Return how each quantized matrix is kept, by name; reads all scales."""
        return {name: matrix.choice for name, matrix in self._matrices.items()}

    def weights(self) -> list[str]:
        """Return a line for each way in which quantized matrices are kept, for each setting of the checkpoint that is
        not applied, and for each part of the model that is left out. Empty if there is nothing to report."""
        return [*report(self.choices()), *self._notes]

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Read a tensor as float32; return a read-only view of the file if the tensor is stored as F32."""
        matrix = self._matrices.get(name)
        values = self._tensors[name].values() if matrix is None else matrix.values()
        order = stored_rows(self.config, name, len(values))
        return values if order is None else values[order]

    def grouped(self, name: str) -> GroupedCodes | None:
        """See `GroupedSource.grouped`."""
        matrix = self._matrices.get(name)
        found = None if matrix is None else matrix.grouped()
        order = None if found is None else stored_rows(self.config, name, len(found.codes))
        return found if found is None or order is None else found.reordered(order)

    def stored(self, name: str) -> Stored:
        """Return the rows of a matrix, as stored in the file, or as a quantized matrix is kept."""
        matrix = self._matrices.get(name)
        if matrix is not None:
            kept = matrix.stored()
            order = stored_rows(self.config, name, matrix.shape[0])
            return kept if order is None else kept.reordered(order)
        stored = self._tensors[name]
        if isinstance(stored, ExpertTensor):
            return Stored.later(_TYPE_IDS[stored.dtype], lambda: _bytes_of(stored), stored.shape[0])
        data = _bytes_of(stored)
        order = stored_rows(self.config, name, stored.shape[0])
        if order is not None:
            return Stored(_TYPE_IDS[stored.dtype], data, order)
        return Stored.plain(_TYPE_IDS[stored.dtype], data, stored.shape[0])

    def release(self) -> None:
        """Unmap the files' resident pages from this process; the pages may stay in the page cache."""
        for data in self._files.values():
            data.madvise(mmap.MADV_DONTNEED)


def _bytes_of(stored: StoredTensor | ExpertTensor) -> npt.NDArray[np.uint8]:
    return stored.raw().view(np.uint8).reshape(-1)


def _are_equal(head: StoredTensor | None, embedding: StoredTensor | None) -> bool:
    """Return whether two tensors have the same bytes; compares a part at a time."""
    if head is None or embedding is None or (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return False
    ours, theirs = _bytes_of(head), _bytes_of(embedding)
    return all(
        np.array_equal(ours[first : first + _COMPARED_BYTES], theirs[first : first + _COMPARED_BYTES])
        for first in range(0, len(ours), _COMPARED_BYTES)
    )


_Rows = TypeVar("_Rows", StoredTensor, QuantizedMatrix)


def _split(tensors: Mapping[str, _Rows], config: ModelConfig) -> dict[str, _Rows]:
    """Return the tensors with fused projections as separate tensors, which are ranges of rows of the fused ones.
    Tensors whose shape does not fit are left for the shape check."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fused = {
        "qkv_proj.weight": (("q_proj", q), ("k_proj", kv), ("v_proj", kv)),
        "gate_up_proj.weight": (("gate_proj", config.intermediate_size), ("up_proj", config.intermediate_size)),
    }
    found: dict[str, _Rows] = {}
    for name, stored in tensors.items():
        room, _, last = name.rpartition(".weight")[0].rpartition(".")
        parts = fused.get(f"{last}.weight", ()) if name.endswith(".weight") else ()
        if not parts or len(stored.shape) != 2 or stored.shape[0] != sum(rows for _, rows in parts):
            found[name] = stored
            continue
        first = 0
        for part, rows in parts:
            found[f"{room}.{part}.weight"] = stored.rows(first, rows)
            first += rows
    return found


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
        raise ModelFileError(f"{path} must contain a JSON object, not a {type(value).__name__}")
    return value


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files: a single file, or all files in the index. Reject names outside the folder."""
    index = folder / "model.safetensors.index.json"
    if not is_present(index):
        single = folder / _SINGLE
        if not is_present(single):
            pickles = sorted(path.name for path in folder.iterdir() if is_pickled(path.name))
            if pickles:
                raise ModelFileError(
                    f"{folder} has only weights that can run code when they are read ({pickles[0]}); {CONVERT}"
                )
            raise ModelFileError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
        return [single]
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ModelFileError(f"{index} has no weight_map")
    names = sorted({str(name) for name in table.values()})
    for name in names:
        if Path(name).name != name or not is_present(folder / name):
            raise ModelFileError(f"{index} lists {name!r}, which is not a file in the folder")
    if _SINGLE not in names and is_present(folder / _SINGLE):
        _log.info("%s is not read: %s lists the files of the weights", folder / _SINGLE, index.name)
    return [folder / name for name in names]
