"""Unpacks 32-bit words of 4-bit or 8-bit values, and checks the shapes of a module's tensors."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import ModelFileError
from kvferry.weights.files.safetensors_file import StoredTensor
from kvferry.weights.tensors import Shape

Codes = npt.NDArray[np.uint8]
FLOATS = ("F16", "BF16", "F32")


def unpack_words(words: npt.NDArray[np.generic], bits: int, order: Sequence[int] | None = None) -> Codes:
    """Unpack words along the last axis: [..., n] int32 to [..., n * 32 / bits] unsigned values.

    Args:
        words: the words.
        bits: bits per value, 4 or 8.
        order: index of the value in each field of a word, lowest bits first; default: in order.
    """
    count = 32 // bits
    raw = words.view(np.uint32)
    codes = np.empty((*words.shape, count), np.uint8)
    for place in range(count):
        codes[..., order[place] if order else place] = (raw >> np.uint32(bits * place)) & np.uint32((1 << bits) - 1)
    return codes.reshape(*words.shape[:-1], words.shape[-1] * count)


class ModuleTensors:
    """The tensors of one module, by the last part of their names."""

    def __init__(self, module: str, tensors: Mapping[str, StoredTensor], where: str) -> None:
        """
        Args:
            module: name of the module.
            tensors: its tensors by the last part of their names.
            where: path of the checkpoint, for error messages.
        """
        self.module = module
        self._tensors = tensors
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def has_shape(self, name: str, shape: Shape) -> bool:
        """Return whether the module has a tensor of this shape.

        Args:
            name: last part of the tensor's name, for example `scales`.
            shape: the shape.
        """
        return name in self._tensors and self._tensors[name].shape == shape

    def damaged(self, what: str) -> ModelFileError:
        """Return the error for tensors that do not fit together."""
        return ModelFileError(f"{self._where}: the quantized module {self.module!r} {what}. The file is damaged")

    def take(self, name: str, types: Sequence[str], shape: Shape | None = None, *, dimensions: int = 2) -> StoredTensor:
        """Return a tensor of the module.

        Args:
            name: last part of its name.
            types: allowed types.
            shape: required shape; `None` for any non-empty shape with `dimensions` dimensions.
            dimensions: required number of dimensions if `shape` is `None`.

        Raises:
            ModelFileError: the tensor is missing or has a wrong type or shape.
        """
        found = self._tensors.get(name)
        if found is None:
            raise self.damaged(f"has no tensor {name!r}")
        if found.dtype not in types:
            raise self.damaged(f"has {name} of type {found.dtype} instead of {' or '.join(types)}")
        if shape is None and (len(found.shape) != dimensions or 0 in found.shape):
            expected = "a matrix" if dimensions == 2 else f"{dimensions} dimensions"
            raise self.damaged(f"has {name} of shape {list(found.shape)} instead of {expected}")
        if shape is not None and found.shape != shape:
            raise self.damaged(f"has {name} of shape {list(found.shape)} instead of {list(shape)}")
        return found
