"""Latent attention on the compiled kernels: sizes, and the rows and columns of its projections."""

import numpy as np
import numpy.typing as npt

from kvferry.weights.config import Latent
from kvferry.weights.tensors import BF16, F16, F32, Stored, TensorSource

Ints = npt.NDArray[np.int64]


def latent_sizes(latent: Latent | None) -> dict[str, int]:
    """Return the sizes under the kernels' names; empty for a model with keys and values. `query_rank` is 0 if queries
    are not projected from a latent vector."""
    if latent is None:
        return {}
    return {
        "rank": latent.rank,
        "rotated": latent.rotated,
        "plain": latent.plain,
        "value": latent.value,
        "query_rank": latent.query_rank or 0,
    }


def transposed_keys(tensors: TensorSource, name: str, heads: int, latent: Latent) -> Stored:
    """Return the transposed key projection of each head, [heads * rank, plain], from the projection of keys and values,
    in its 16-bit type or as float32.

    Args:
        tensors: the model's tensors.
        name: name of the projection of keys and values, [heads * (plain + value), rank].
        heads: number of attention heads.
        latent: dimensions of the latent attention.
    """
    kind = tensors.stored(name).type_id

    def load() -> npt.NDArray[np.uint8]:
        up = tensors.read(name).reshape(heads, latent.plain + latent.value, latent.rank)
        keys = np.ascontiguousarray(up[:, : latent.plain].transpose(0, 2, 1))
        if kind == BF16:
            values: npt.NDArray[np.generic] = (keys.view(np.uint32) >> 16).astype(np.uint16)
        else:
            values = keys.astype(np.float16) if kind == F16 else keys
        return values.view(np.uint8).reshape(-1)

    return Stored.later(kind if kind in (F16, BF16) else F32, load, heads * latent.rank)


def value_rows(heads: int, latent: Latent) -> Ints:
    """Return the rows that belong to the values of all heads in a projection of keys and values.

    Args:
        heads: number of attention heads.
        latent: sizes of the latent attention.
    """
    size = latent.plain + latent.value
    found: Ints = (np.arange(heads)[:, None] * size + np.arange(latent.plain, size)).reshape(-1)
    return found
