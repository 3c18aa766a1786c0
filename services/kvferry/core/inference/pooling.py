"""Parameters of a pooled vector: how the hidden states of a prompt become one vector."""

from dataclasses import dataclass
from enum import StrEnum

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
