"""Random weights for a model's shape, generated on the compute device in the compute dtype; no file is needed.

Each tensor depends on the seed, its name and the kind of device. As in the tiny test model, variances are chosen so
that activations stay near one and logits are distinct.
"""

import hashlib
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from kvferry.weights.config import ModelConfig
from kvferry.weights.tensors import BF16, EMBEDDING, F16, F32, HEAD, Shape, Stored, expected_shapes

_TYPE_IDS = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}
_SPREAD_OF_NORMS = 0.1
_GAIN_OF_LOGITS = 3.0


class RandomTensors:
    """`TensorSource` of random weights; loaders for a GPU use `draw` instead of `read`."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> None:
        """
        Args:
            config: configuration of the model, from which the shapes follow.
            dtype: dtype of the tensors: float32, float16 or bfloat16.
            device: device on which `draw` generates.
            seed: seed of the values.
        """
        self._shapes = expected_shapes(config)
        self._is_tied = config.tie_word_embeddings
        self._dtype = dtype
        self._device = torch.device(device)
        self._seed = seed

    def shapes(self) -> Mapping[str, Shape]:
        """Return the shape of every tensor, by name."""
        return self._shapes

    def draw(self, name: str) -> torch.Tensor:
        """Generate one tensor on the device and in the dtype of this source, in the model's shape for this name.

        Raises:
            KeyError: the model has no tensor with this name.
        """
        shape = self._shapes[name]
        key = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(key[:8], "little") >> 1)
        values = torch.empty(shape, dtype=self._dtype, device=self._device)
        mean, spread = (1.0, _SPREAD_OF_NORMS) if name.endswith("norm.weight") else (0.0, self._spread(name, shape))
        return values.normal_(mean, spread, generator=generator)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """See `TensorSource.read`: the values of `draw`, as float32."""
        found: npt.NDArray[np.float32] = self.draw(name).to("cpu", torch.float32).numpy()
        return found

    def stored(self, name: str) -> Stored:
        """See `TensorSource.stored`."""
        values = self.draw(name).cpu()
        data: npt.NDArray[np.uint8] = values.view(torch.uint8).reshape(-1).numpy()
        return Stored.plain(_TYPE_IDS[self._dtype], data, len(values))

    def weights(self) -> list[str]:
        """See `TensorSource.weights`."""
        return []

    def release(self) -> None:
        """Do nothing, since tensors are not kept."""

    def _spread(self, name: str, shape: Shape) -> float:
        if name == EMBEDDING and not self._is_tied:
            return 1.0
        gain = _GAIN_OF_LOGITS if name in {EMBEDDING, HEAD} else 1.0
        return gain / math.sqrt(shape[-1])
