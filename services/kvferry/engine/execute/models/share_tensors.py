"""Reads one rank's share of a model's tensors."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import UsageError
from kvferry.kernels import compiled
from kvferry.weights.config import ModelConfig
from kvferry.weights.shares import Share, cut_of
from kvferry.weights.tensors import Shape, Stored, TensorSource

Bytes = npt.NDArray[np.uint8]


class ShareTensors:
    """The tensors of one rank's share, in their stored formats. A `TensorSource`."""

    def __init__(self, tensors: TensorSource, config: ModelConfig, share: Share) -> None:
        """
        Args:
            tensors: tensors of the whole model.
            config: configuration of the whole model.
            share: the rank's share.
        """
        self._tensors = tensors
        self._cuts = {name: cut_of(name, config, share) for name in tensors.shapes()}
        self._size = share.size

    def shapes(self) -> Mapping[str, Shape]:
        """See `TensorSource.shapes`."""
        return {name: self._cuts[name].shape_of(shape) for name, shape in self._tensors.shapes().items()}

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """See `TensorSource.read`."""
        cut, values = self._cuts[name], self._tensors.read(name)
        if cut.rows is not None:
            values = values[cut.rows.start : cut.rows.stop]
        if cut.columns is not None:
            values = values[:, cut.columns.start : cut.columns.stop]
        return np.zeros_like(values) if cut.is_zero else np.ascontiguousarray(values)

    def stored(self, name: str) -> Stored:
        """See `TensorSource.stored`.

        Raises:
            UsageError: the quantized blocks of a row cannot be divided at the share's columns.
        """
        cut, stored = self._cuts[name], self._tensors.stored(name)
        if cut.rows is None and cut.columns is None:
            return stored
        width = self._tensors.shapes()[name][1]
        columns = range(width) if cut.columns is None else cut.columns
        row, begin, end = (compiled.row_bytes(stored.type_id, n) for n in (width, columns.start, columns.stop))
        if (columns.start and not begin) or not end:
            raise UsageError(
                f"the model cannot be divided among {self._size} ranks: columns {columns.start} to {columns.stop - 1} "
                f"of tensor {name!r} do not begin and end with quantized blocks; use fewer ranks, or 1",
                field="tensor_parallel",
            )
        order = stored.order if cut.rows is None else stored.order[cut.rows.start : cut.rows.stop]

        def load() -> Bytes:
            return np.ascontiguousarray(stored.data.reshape(-1, row)[order, begin:end]).reshape(-1)

        return Stored.later(stored.type_id, load, len(order))

    def weights(self) -> list[str]:
        """See `TensorSource.weights`."""
        return self._tensors.weights()

    def release(self) -> None:
        """See `TensorSource.release`."""
        self._tensors.release()
