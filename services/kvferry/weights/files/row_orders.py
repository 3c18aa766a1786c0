"""Order of the rows of projections to queries and keys: the engine rotates pairs of rows that are half a head apart,
and files may store them in other orders. Scores do not depend on the order, since queries and keys share it."""

import re

import numpy as np
import numpy.typing as npt

from kvferry.weights.config import Latent, ModelConfig

Rows = npt.NDArray[np.int64]

_ROTATED = re.compile(r"self_attn\.[qk]_(?:proj\.(?:weight|bias)|norm\.weight)$")
"""Tensors whose rows produce values of queries or keys."""
_LATENT_ROTATED = re.compile(r"self_attn\.(q|q_b|kv_a)_proj(?:_with_mqa)?\.weight$")
"""The corresponding tensors of latent attention; the last values of each head, or of the latent vector, are rotated."""


def stored_rows(config: ModelConfig, name: str, rows: int) -> Rows | None:
    """Return the stored row of each row of a tensor of a Hugging Face checkpoint; `None` if the rows are stored in
    order.

    Args:
        config: the model's configuration.
        name: name of the tensor.
        rows: number of its rows.
    """
    if config.latent is not None:
        part = _LATENT_ROTATED.search(name)
        return None if part is None else pairs_apart(config.latent, rows, is_vector=part[1] == "kv_a")
    return rotated_first(config, rows) if _ROTATED.search(name) else None


def halves_from_pairs(rows: int, head_dim: int) -> Rows:
    """Return the stored row of each row of a projection whose files have the rows of a head in the order 0, half,
    1, half + 1, ..., as llama.cpp stores Llama's.

    Args:
        rows: number of rows, a multiple of `head_dim`.
        head_dim: number of rows of a head, even.

    Returns:
        [rows] int64.
    """
    half = head_dim // 2
    order: Rows = np.arange(rows, dtype=np.int64).reshape(-1, half, 2).swapaxes(1, 2).reshape(-1)
    return order


def rotated_first(config: ModelConfig, rows: int) -> Rows | None:
    """Return the stored row of each row of a query or key projection, so that rotary pairs are half a head apart.

    A partly rotated head stores the halves of its rotated values first: r0 .. r(n/2 - 1), r(n/2) .. r(n - 1), p0 ..
    p(m - 1). The engine rotates pairs (i, i + head_dim/2) of all heads, and its table has angle zero for pairs of plain
    values: r0 .. r(n/2 - 1), p0 .. p(m/2 - 1) | r(n/2) .. r(n - 1), p(m/2) .. p(m - 1). Scores do not depend on the
        order, since queries and keys share it.
    """
    if config.rotary_dim is None:
        return None
    half, turned = config.head_dim // 2, config.rotary_dim // 2
    plain = np.arange(config.rotary_dim, config.head_dim)
    head = np.concatenate(
        (np.arange(turned), plain[: half - turned], np.arange(turned, 2 * turned), plain[half - turned :])
    )
    order: Rows = (np.arange(0, rows, config.head_dim)[:, None] + head).reshape(-1)
    return order


def pairs_apart(latent: Latent, rows: int, *, is_vector: bool) -> Rows | None:
    """Return the stored row of each row of a projection to the queries of all heads, or to latent vectors. The files
    store rotary pairs next to each other; the result puts them half of the rotated values apart. `None` if the files
    already do."""
    if not latent.is_interleaved:
        return None
    size = latent.width if is_vector else latent.plain + latent.rotated
    turned = np.arange(size - latent.rotated, size)
    one = np.concatenate((np.arange(size - latent.rotated), turned[0::2], turned[1::2]))
    order: Rows = (np.arange(0, rows, size)[:, None] + one).reshape(-1)
    return order
