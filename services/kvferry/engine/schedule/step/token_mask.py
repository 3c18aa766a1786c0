"""Masks of the tokens that may come next in a constrained sequence, computed while the step runs."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint8]
"""[ceil(vocabulary / 8)] uint8: one bit per token, the lowest bit of a byte first."""


def has_token(bits: Bits, token: int) -> bool:
    """Return whether the bit of a token is set.

    Args:
        bits: mask of a vocabulary, [ceil(vocabulary / 8)] uint8, lowest bit first.
        token: token id.
    """
    return bool(bits[token >> 3] >> (token & 7) & 1)


def unpacked(bits: Bits, vocabulary: int) -> npt.NDArray[np.bool_]:
    """Return the bits as [vocabulary] bool.

    Args:
        bits: mask of a vocabulary, [ceil(vocabulary / 8)] uint8, lowest bit first.
        vocabulary: number of token ids.
    """
    return np.unpackbits(bits, count=vocabulary, bitorder="little").view(np.bool_)


class TokenMask(Protocol):
    """Mask of the next token of one sequence."""

    @property
    def is_ready(self) -> bool:
        """Whether `wait` returns without waiting."""
        ...

    def wait(self) -> Bits | None:
        """Return which tokens may come next; `None` if the mask is not ready in time. In that case, the sequence must
        be left out of steps until `is_ready`.

        Raises:
            KvferryError: the constraint cannot be compiled or continued; the sequence must end.
        """
        ...

    def after(self, token_ids: Sequence[int]) -> "TokenMask":
        """Return the mask of the token after `token_ids`, which this mask allowed; this mask must not be used again."""
        ...

    def following(self) -> "TokenMask":
        """Return the mask of the token that follows this mask's token, before the latter is known. `after` starts
        computing it and returns the same mask; after `abandon`, its `wait` returns `None`."""
        ...

    def abandon(self) -> None:
        """Give up the mask that `following` returned, if any: its token will not be sampled. Idempotent."""
        ...

    def forced_tokens(self) -> Sequence[int]:
        """Return tokens that the constraint probably forces next, for drafts; the text that must follow may also have
        other tokenizations. Empty if there are none, or the mask is not ready in time."""
        ...

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens the constraint allows in succession; 0 if the mask is not ready."""
        ...

    def after_each(self, token_ids: Sequence[int]) -> "Sequence[TokenMask]":
        """Start computing the mask after each prefix of `token_ids`, which must be allowed. The masks support only
        `wait`; this mask can still be used."""
        ...
