"""Reads and checks the keys of one architecture in a GGUF header, and refuses keys that nothing has read."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np

from kvferry.core.errors import ModelFileError
from kvferry.model.files.gguf.header import Array, Header, Value

_HARMLESS: Mapping[str, tuple[Value, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),
    "expert_used_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_norm": (False,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.type": ("none",),
    "use_parallel_residual": (False,),
}
"""Keys that an architecture may leave unread, with the values that have no effect; all others are refused."""
_IDLE = ("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor")
"""Keys without an effect unless `rope.scaling.type` names a scaling."""


class HeaderFields:
    """Keys of a header that begin with the name of its architecture."""

    def __init__(self, header: Header, architecture: str, path: Path) -> None:
        """
        Args:
            header: the header.
            architecture: value of `general.architecture`.
            path: the file, for messages.
        """
        self.path = path
        self.tensors = header.tensors
        self._prefix = f"{architecture}."
        self._pairs = {
            key.removeprefix(self._prefix): value for key, value in header.pairs.items() if key.startswith(self._prefix)
        }
        self._read: set[str] = set()

    def value(self, key: str) -> Value | None:
        """Return a value as it is; `None` if the key is absent."""
        self._read.add(key)
        return self._pairs.get(key)

    def ignore(self, *keys: str) -> None:
        """Declare that keys have no effect in this architecture."""
        self._read.update(keys)

    def refuse(self, key: str, why: str) -> NoReturn:
        """Refuse the value of a key.

        Raises:
            ModelFileError: always.
        """
        shown = repr(self._pairs.get(key))[:40]
        raise ModelFileError(
            f"{self.path}: {self._prefix}{key} = {shown} is not supported: {why}. Use the model's safetensors folder"
        )

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a whole number from 1 to 2^31 - 1.

        Raises:
            ModelFileError: the value is not such a number, or is absent without a default.
        """
        value = self.value(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise ModelFileError(f"{self.path}: {self._prefix}{key} must be a positive whole number, not {value!r}")
        return value

    def optional_whole(self, key: str) -> int | None:
        """Return a positive whole number; `None` if the key is absent or 0."""
        return self.whole(key) if self.value(key) else None

    def real(self, key: str, default: float | None = None) -> float:
        """Return a positive number. Numbers are stored as float32: 1e-05 is 9.999999747378752e-06 in the file, and
        1e-05 in the checkpoint.

        Raises:
            ModelFileError: the value is not such a number, or is absent without a default.
        """
        value = self.value(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelFileError(f"{self.path}: {self._prefix}{key} must be a positive number, not {value!r}")
        return float(str(np.float32(value)))

    def optional_real(self, key: str) -> float | None:
        """Return a positive number; `None` if the key is absent or 0."""
        return self.real(key) if self.value(key) else None

    def flag(self, key: str) -> bool:
        """Return a boolean; false if the key is absent.

        Raises:
            ModelFileError: the value is not a boolean.
        """
        value = self.value(key)
        if value is not None and not isinstance(value, bool):
            raise ModelFileError(f"{self.path}: {self._prefix}{key} must be true or false, not {value!r}")
        return bool(value)

    def refuse_unread(self) -> None:
        """Refuse keys that have not been read and whose values may change the computation.

        Raises:
            ModelFileError: there is such a key.
        """
        is_scaled = "rope.scaling.type" in self._read
        for key, value in self._pairs.items():
            if key in self._read or (key in _IDLE and not is_scaled):
                continue
            if isinstance(value, Array) or value not in _HARMLESS.get(key, ()):
                self.refuse(key, "kvferry does not implement it")
