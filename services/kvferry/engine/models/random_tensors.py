"""Random weights of a model's shape, drawn where they compute and in the type that they compute in: no file is read.

Each tensor depends on the seed, its own name and the kind of device. Variances keep activations near one and logits
apart, as the tiny model's do.
"""

import hashlib
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from kvferry.model.config import ModelConfig
from kvferry.model.tensors import BF16, EMBEDDING, F16, F32, HEAD, Shape, Stored, expected_shapes

_TYPE_IDS = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}
_SPREAD_OF_NORMS = 0.1
_GAIN_OF_LOGITS = 3.0


class RandomTensors:
    """A `TensorSource`, and one that whoever loads onto a device asks by `draw`."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> None:
        self._shapes = expected_shapes(config)
        self._is_tied = config.tie_word_embeddings
        self._dtype = dtype
        self._device = torch.device(device)
        self._seed = seed

    def shapes(self) -> Mapping[str, Shape]:
        """Every tensor's shape."""
        return self._shapes

    def draw(self, name: str) -> torch.Tensor:
        """One tensor on its device.

        Raises:
            KeyError: there is no tensor of that name.
        """
        shape = self._shapes[name]
        key = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(key[:8], "little") >> 1)
        values = torch.empty(shape, dtype=self._dtype, device=self._device)
        mean, spread = (1.0, _SPREAD_OF_NORMS) if name.endswith("norm.weight") else (0.0, self._spread(name, shape))
        return values.normal_(mean, spread, generator=generator)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """See `TensorSource.read`: the values that were drawn, so those that the model computes with."""
        found: npt.NDArray[np.float32] = self.draw(name).to("cpu", torch.float32).numpy()
        return found

    def stored(self, name: str) -> Stored:
        """See `TensorSource.stored`."""
        values = self.draw(name).cpu()
        data: npt.NDArray[np.uint8] = values.view(torch.uint8).reshape(-1).numpy()
        return Stored.plain(_TYPE_IDS[self._dtype], data, len(values))

    def release(self) -> None:
        """Nothing is kept."""

    def _spread(self, name: str, shape: Shape) -> float:
        if name == EMBEDDING and not self._is_tied:
            return 1.0
        gain = _GAIN_OF_LOGITS if name in {EMBEDDING, HEAD} else 1.0
        return gain / math.sqrt(shape[-1])
