"""Reads and checks the keys of one architecture in a GGUF header, and refuses keys that were not read."""

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np

from kvferry.weights.checkpoints.gguf.header import Array, Header, Value
from kvferry.weights.families.config_fields import ConfigFields

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


class HeaderFields(ConfigFields):
    """Keys of a header that begin with the name of its architecture."""

    def __init__(self, header: Header, architecture: str, path: Path) -> None:
        """
        Args:
            header: the header.
            architecture: value of `general.architecture`.
            path: the file, for messages.
        """
        prefix = f"{architecture}."
        own = {key.removeprefix(prefix): value for key, value in header.pairs.items() if key.startswith(prefix)}
        super().__init__(own, path, prefix=prefix)
        self.tensors = header.tensors

    def refuse(self, key: str, remedy: str = "kvferry does not implement it") -> NoReturn:
        """Refuse the value of a key.

        Raises:
            ModelFileError: always.
        """
        super().refuse(key, f"{remedy}. Use the model's safetensors folder")

    def real(self, key: str, default: float | None = None) -> float:
        """Return a positive number. Numbers are stored as float32: 1e-05 is 9.999999747378752e-06 in the file, and
        1e-05 in the checkpoint.

        Raises:
            ModelFileError: the value is not such a number, or is absent without a default.
        """
        return float(str(np.float32(super().real(key, default))))

    def optional_whole(self, key: str) -> int | None:
        """Return a positive whole number; `None` if the key is absent or 0."""
        return self.whole(key) if self.value(key) else None

    def optional_real(self, key: str) -> float | None:
        """Return a positive number; `None` if the key is absent or 0."""
        return self.real(key) if self.value(key) else None

    def refuse_unread(self) -> None:
        """Refuse keys that have not been read and whose values may change the computation.

        Raises:
            ModelFileError: there is such a key.
        """
        for key, value in self._raw.items():
            if key not in self._read and (isinstance(value, Array) or value not in _HARMLESS.get(key, ())):
                self.refuse(key)
