"""Opens a GGUF file as a model: reads the configuration from its header, and its tensors by Hugging Face name."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import ModelFileError
from kvferry.weights.checkpoints.gguf.config_fields import architecture_of, config_fields
from kvferry.weights.checkpoints.gguf.dequantize import dequantize, kept_mxfp4
from kvferry.weights.checkpoints.gguf.header import TensorInfo
from kvferry.weights.checkpoints.gguf.parts import GgufParts, model_name
from kvferry.weights.checkpoints.gguf.tensor_views import ROPE_DIVISORS, LatentUp, TensorView, views_of
from kvferry.weights.config import ModelConfig
from kvferry.weights.families.registry import read_config
from kvferry.weights.files.row_orders import Rows, halves_from_pairs, stored_rows
from kvferry.weights.quantized.grouped import GroupedCodes, gguf_codes
from kvferry.weights.rope import DividedRope
from kvferry.weights.tensors import F32, Shape, Stored, check_shapes

_PAIRED = re.compile(r"self_attn\.[qk]_proj\.(?:weight|bias)$")
_MXFP4 = "MXFP4"


class GgufModel:
    """An open GGUF file, or the files of a split model: `config`, the header's key-value `pairs` (with tokenizer and
    template), and the weights.

    Implements `TensorSource`. The files are memory-mapped and must not change while they are open.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        """
        Args:
            path: the GGUF file; of a split model, the first file.
            name: model name for clients; `None` selects the file name without its suffix.

        Raises:
            ModelFileError: the file is missing, damaged or unsupported.
        """
        self.path = path
        self._parts = GgufParts.open(path)
        header = self._parts.header
        self.pairs = header.pairs
        self._infos = header.tensors
        architecture = architecture_of(header, path)
        fields = config_fields(header, architecture, path, lambda tensor: self._vector(tensor).tolist())
        config = read_config(fields, name or model_name(path), path)
        if architecture.adds_norm_offset:
            config = replace(config, norm_offset=0.0)
        self.config = self._with_divisors(config)
        self._has_pairs = architecture.has_pairs
        self._views = views_of(
            header.tensors, architecture.names, self.config, has_fused_mlp=architecture.has_fused_mlp
        )
        check_shapes(self.config, self.shapes(), str(path))

    def _with_divisors(self, config: ModelConfig) -> ModelConfig:
        if ROPE_DIVISORS not in self._infos:
            return config
        divisors = self._vector(ROPE_DIVISORS)
        count = (config.rotary_dim or config.head_dim) // 2
        if config.rope_scaling is not None or divisors.shape != (count,) or not (divisors > 0).all():
            raise ModelFileError(
                f"{self.path}: tensor {ROPE_DIVISORS} must have {count} positive numbers, in a model without another"
                " scaling of its rotary embedding. The file is damaged or of an unsupported variant"
            )
        return replace(config, rope_scaling=DividedRope(tuple(divisors.tolist())))

    def _vector(self, name: str) -> npt.NDArray[np.float32]:
        """Read a vector by its name in the file.

        Raises:
            ModelFileError: the file has no such vector, or it has values that are not finite.
        """
        info = self._infos.get(name)
        if info is None or len(info.shape) != 1:
            raise ModelFileError(f"{self.path}: tensor {name} is missing or is not a vector. The file is damaged")
        values = dequantize(self._parts.bytes_of(info), info)
        if not np.isfinite(values).all():
            raise ModelFileError(f"{self.path}: tensor {name} holds values that are not finite. The file is damaged")
        return values

    def shapes(self) -> Mapping[str, Shape]:
        """Return the shape of every tensor by its Hugging Face name."""
        return {name: view.shape for name, view in self._views.items()}

    def weights(self) -> list[str]:
        """Return a line for each tensor type, with the number of tensors and their bytes."""
        found: dict[str, list[TensorInfo]] = {}
        for info in self._infos.values():
            found.setdefault(info.type_name, []).append(info)
        return [f"{kind}: {len(of)} tensors of {sum(i.num_bytes for i in of)} bytes" for kind, of in found.items()]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the file."""
        return sum(info.num_bytes for info in self._infos.values())

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Read a tensor, dequantized to float32, in the shape of the Hugging Face checkpoint.

        Raises:
            KeyError: the model has no tensor with this name.
        """
        view = self._views[name]
        if isinstance(view, LatentUp):
            return self._latent_up(view)
        info = replace(view.info, shape=view.shape, num_bytes=view.num_bytes)
        values = dequantize(self._rows(view), info)
        order = self._order(name, view.shape[0])
        return values if order is None else np.ascontiguousarray(values[order])

    def grouped(self, name: str) -> GroupedCodes | None:
        """See `GroupedSource.grouped`."""
        view = self._views[name]
        if isinstance(view, LatentUp):
            return None
        found = gguf_codes(view.info.type_name, self._rows(view), view.shape[0])
        order = None if found is None else self._order(name, view.shape[0])
        return found if found is None or order is None else found.reordered(order)

    def stored(self, name: str) -> Stored:
        """Return the quantized rows of a matrix, as stored in the file."""
        view = self._views[name]
        if isinstance(view, LatentUp):
            return Stored.later(F32, lambda: self._latent_up(view).view(np.uint8).reshape(-1), view.shape[0])
        order = self._order(name, view.shape[0])
        rows = np.arange(view.shape[0], dtype=np.int64) if order is None else order
        if view.info.type_name == _MXFP4:
            kept, convert = kept_mxfp4(self._rows(view))
            return Stored(kept.type_id, convert, rows)
        return Stored(view.info.type_id, self._rows(view), rows)

    def release(self) -> None:
        """Unmap the file's resident pages from this process; the pages may stay in the page cache."""
        self._parts.release()

    def _rows(self, view: TensorView) -> npt.NDArray[np.uint8]:
        start = view.first * view.info.row_bytes
        return self._parts.bytes_of(view.info)[start : start + view.num_bytes]

    def _latent_up(self, view: LatentUp) -> npt.NDArray[np.float32]:
        keys, values = (dequantize(self._parts.bytes_of(info), info) for info in (view.keys, view.values))
        return np.concatenate((keys.swapaxes(1, 2), values), axis=1).reshape(view.shape)

    def _order(self, name: str, rows: int) -> Rows | None:
        """Return the stored row of each row of a tensor; `None` if the rows are stored in order."""
        if self._has_pairs:
            return halves_from_pairs(rows, self.config.head_dim) if _PAIRED.search(name) else None
        return stored_rows(self.config, name, rows)
