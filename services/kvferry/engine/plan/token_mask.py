"""The tokens that may come next in a constrained sequence, which are computed while the step runs."""

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
