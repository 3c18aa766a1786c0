"""Checks and similarity of pooled vectors."""

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import InvalidRequest


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    """Check the number of values to keep.

    Args:
        dimensions: number of values to keep; `None` for all.
        hidden_size: number of values of a hidden state.

    Raises:
        InvalidRequest: the number is not between 1 and the hidden size.
    """
    if dimensions is not None and not 1 <= dimensions <= hidden_size:
        raise InvalidRequest(
            f"dimensions must be between 1 and {hidden_size}, the length of the model's vectors, not {dimensions}",
            field="dimensions",
        )


def cosine(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    """Return the cosine similarity of two vectors, from -1 to 1; 0 if one of them is zero.

    Args:
        a, b: vectors of equal length, [n] float32.
    """
    left, right = a.astype(np.float64), b.astype(np.float64)
    norms = float(np.linalg.norm(left) * np.linalg.norm(right))
    return float(np.clip(np.dot(left, right) / norms, -1.0, 1.0)) if norms else 0.0
