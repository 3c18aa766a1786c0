"""Parameters of a pooled vector: how the hidden states of a prompt become one vector."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import InvalidRequest, shortened


class Pooling(StrEnum):
    """Selection of the hidden states from which a vector is made (Reimers and Gurevych, Sentence-BERT, 2019, section
    3)."""

    LAST = "last"
    """The hidden state of the last token, the only one that depends on all tokens in a causal model."""
    MEAN = "mean"
    """The mean of the hidden states of all tokens."""
    CLS = "cls"
    """The hidden state of the first token; in a causal model it depends on that token alone."""


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Parameters of one pooled vector."""

    pooling: Pooling = Pooling.LAST
    normalize: bool = True
    """Whether the vector is divided by its L2 norm; a vector of zeros is unchanged."""
    dimensions: int | None = None
    """Number of leading values to keep, before the vector is normalized; `None` for all. Truncated vectors are useful
    only with models trained for it (Kusupati et al., Matryoshka Representation Learning, 2022)."""


def pooling_named(name: str, field: str = "pooling") -> Pooling:
    """Return the pooling method with this name.

    Args:
        name: name that a request has sent.
        field: name of the request's field, for error messages.

    Raises:
        InvalidRequest: the name is unknown.
    """
    try:
        return Pooling(name)
    except ValueError:
        names = ", ".join(Pooling)
        raise InvalidRequest(f"{field} must be one of {names}, not {shortened(repr(name))}", field=field) from None


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
