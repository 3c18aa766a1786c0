"""Opens the files of a head's folder: config.json and one safetensors file, whose names are mapped to one form.

The shape of every tensor is checked against the configuration and the target model before its values are read, so that
a file cannot make this process allocate more than the file's own size.
"""

import math
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import ModelFileError
from kvferry.weights.files.regular_file import copy_file
from kvferry.weights.files.safetensors_file import FLOAT_TYPES, StoredTensor, open_tensors
from kvferry.weights.tensors import BF16, F16, F32, Shape, Stored

CONFIG_FILE = "config.json"
_MAX_FILE_BYTES = 16 << 30
_MAX_HEADER_BYTES = 1 << 20  # a head has fewer than 200 tensors
_TYPES = (*FLOAT_TYPES, "I64", "BOOL")
_TYPE_IDS = {"F32": F32, "F16": F16, "BF16": BF16}
_CHECKED_VALUES = 1 << 22
_PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
Floats = npt.NDArray[np.float32]


class HeadTensors:
    """The tensors of a head, by name, as a `weights.tensors.TensorSource`."""

    def __init__(self, path: Path, found: Mapping[str, StoredTensor]) -> None:
        """
        Args:
            path: path of the file, for error messages.
            found: the tensors by name.
        """
        self.path = path
        self._found = dict(found)

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def shapes(self) -> Mapping[str, Shape]:
        """Return the shape of every tensor by name."""
        return {name: tensor.shape for name, tensor in self._found.items()}

    def read(self, name: str) -> Floats:
        """Read a tensor of a float type as float32, in memory of its own.

        Raises:
            KeyError: the head has no tensor with this name.
        """
        return np.array(self._found[name].values())  # a copy, so that the memory of the file can be freed

    def stored(self, name: str) -> Stored:
        """Return a matrix in its stored format."""
        tensor = self._found[name]
        return Stored.plain(_TYPE_IDS[tensor.dtype], tensor.raw().view(np.uint8).reshape(-1), tensor.shape[0])

    def whole_numbers(self, name: str) -> npt.NDArray[np.int64]:
        """Read a tensor of integers or booleans as int64, in its shape.

        Raises:
            KeyError: the head has no tensor with this name.
        """
        return self._found[name].raw().astype(np.int64)

    def weights(self) -> list[str]:
        """Return an empty list, since heads are not quantized."""
        return []

    def release(self) -> None:
        """Do nothing: the file is small."""

    def check(self, expected: Mapping[str, Shape], *, whole: Sequence[str] = ()) -> None:
        """Check that the tensors are exactly the expected ones.

        Args:
            expected: shapes by name.
            whole: names of the tensors of integers or booleans; all others have a float type.

        Raises:
            ModelFileError: a tensor is missing or unknown, or has a wrong shape or type, or values that are not finite;
                `field` names it.
        """
        for name, shape in expected.items():
            tensor = self._found.get(name)
            if tensor is None:
                self.refuse(name, "is missing; save the head again")
            if tensor.shape != shape:
                self.refuse(
                    name,
                    f"must have shape {list(shape)}, according to the model and {CONFIG_FILE}, not "
                    f"{list(tensor.shape)}; use a head that was trained for this model",
                )
            if (tensor.dtype in _TYPE_IDS) == (name in whole):
                self.refuse(name, f"has the wrong type {tensor.dtype}; save the head again")
        for name in self._found:
            if name not in expected:
                self.refuse(name[:120], "is unknown; this variant of the head is not supported")
        for name in expected:
            if name not in whole and not _is_finite(self._found[name]):
                self.refuse(name, "has values that are not finite; save the head again")

    def refuse(self, name: str, why: str) -> NoReturn:
        """Refuse a tensor.

        Args:
            name: name of the tensor.
            why: the rest of the message after the name, for example `is missing`.

        Raises:
            ModelFileError: always.
        """
        raise ModelFileError(f"{self.path}: tensor {name!r} {why}", field=name)


def _is_finite(tensor: StoredTensor) -> bool:
    """Return whether all values are finite; converts at most `_CHECKED_VALUES` at a time, or one row."""
    step = max(1, _CHECKED_VALUES * tensor.shape[0] // max(1, math.prod(tensor.shape)))
    return all(
        bool(np.isfinite(tensor.rows(first, min(step, tensor.shape[0] - first)).values()).all())
        for first in range(0, tensor.shape[0], step)
    )


def _copied(path: Path) -> mmap.mmap:
    return copy_file(path, _MAX_FILE_BYTES)


def open_head(folder: Path, files: Sequence[str], renamed: Mapping[str, str], ignored: Sequence[str]) -> HeadTensors:
    """Open the safetensors file of a head.

    Args:
        folder: the folder.
        files: names that the file may have; the first that exists is used.
        renamed: prefixes to replace in names, with their replacements.
        ignored: names of tensors that are not used, such as a copy of the target model's embedding.

    Raises:
        ModelFileError: the file is missing or damaged.
    """
    path = next((folder / name for name in files if (folder / name).is_file()), None)
    if path is None:
        pickles = [name for name in _PICKLES if (folder / name).is_file()]
        raise ModelFileError(
            f"{folder} has no {' or '.join(files)}"
            + (
                f"; {pickles[0]} can execute code when it is loaded: convert it to safetensors as "
                "in docs/speculation.md"
                if pickles
                else "; use the checkpoint folder of a speculation head"
            ),
            field="speculation",
        )
    found: dict[str, StoredTensor] = {}
    for name, tensor in open_tensors(path, _MAX_HEADER_BYTES, _TYPES, read=_copied).items():
        start = next((start for start in renamed if name.startswith(start)), "")
        own = renamed[start] + name[len(start) :] if start else name
        if own in found:
            raise ModelFileError(f"{path}: tensor {own!r} is stored under two names; save the head again", field=own)
        if own not in ignored:
            found[own] = tensor
    return HeadTensors(path, found)
