"""Masks of the tokens that may come next in a constrained sequence, computed while the step runs."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class TokenMask(Protocol):
    """Mask of the next token of one sequence."""

    @property
    def is_ready(self) -> bool:
        """Whether `wait` returns without waiting."""
        ...

    def wait(self) -> npt.NDArray[np.bool_] | None:
        """Return which tokens may come next, [vocabulary] bool; `None` if the mask is not ready in time. Then the
        sequence must be left out of the steps until `is_ready`.

        Raises:
            KvferryError: the constraint cannot be compiled or continued; the sequence must end.
        """
        ...

    def after(self, token_ids: Sequence[int]) -> "TokenMask":
        """Return the mask of the token after `token_ids`, which this mask allowed; this mask must not be used again."""
        ...

    def forced_tokens(self) -> Sequence[int]:
        """Return tokens that the constraint probably forces next, for drafts: the shortest output that follows may also
        be split otherwise into tokens. Empty if there are none, or the mask is not ready in time."""
        ...

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens the constraint allows in succession; 0 if the mask is not ready."""
        ...

    def after_each(self, token_ids: Sequence[int]) -> "Sequence[TokenMask]":
        """Start to compute the mask after each prefix of `token_ids`, which must be allowed. The masks are only for
        `wait`; this mask can still be used."""
        ...
