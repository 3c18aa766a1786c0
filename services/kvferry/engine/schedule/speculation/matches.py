"""Longest suffix of a token sequence that also occurs earlier in it.

    tokens   7 8 9 4 5 | 2 | 7 8 9 ?       the suffix 7 8 9 ends earlier at position 2; 4 5 followed
             -----           -----

The search compares whole arrays: one pass for the last token, then one comparison per further token among the positions
that remain. It needs no index, so nothing has to be built for a prompt, and only the tokens are kept for a sequence.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Positions = npt.NDArray[np.intp]

SEARCHED_TOKENS = 1 << 16
"""Number of tokens at the end that are searched, which bounds the time of a search to about 50 microseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """The earlier occurrences of the longest suffix that has any."""

    tokens: Tokens
    """The searched tokens."""
    ends: Positions
    """Index in `tokens` of the last token of each occurrence, ascending; not empty."""
    length: int
    """Length of the suffix in tokens, at most the limit of the search."""


def longest_matches(tokens: Tokens, *, min_length: int, max_length: int) -> Matches | None:
    """Find the earlier occurrences of the longest suffix of `tokens`; `None` if none has `min_length` tokens.

    Args:
        tokens: [N] int32.
        min_length: minimum length of the suffix, at least 1.
        max_length: length above which matches are not distinguished.
    """
    tokens = tokens[-SEARCHED_TOKENS:]
    last = len(tokens) - 1
    if last < min_length:
        return None
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    length = 1
    while len(ends) and length < max_length:
        longer = ends[np.searchsorted(ends, length) :]  # an occurrence cannot begin before the first token
        longer = longer[tokens[longer - length] == tokens[last - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return Matches(tokens, ends, length) if len(ends) and length >= min_length else None


class TokenArray:
    """The tokens of one sequence as an array that grows. Appending takes amortized constant time per token."""

    __slots__ = ("_count", "_memory")

    def __init__(self) -> None:
        self._memory: Tokens = np.empty(1024, np.int32)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, tokens: list[int]) -> None:
        """Append tokens."""
        end = self._count + len(tokens)
        if end > len(self._memory):
            grown = np.empty(max(end, 2 * len(self._memory)), np.int32)
            grown[: self._count] = self._memory[: self._count]
            self._memory = grown
        self._memory[self._count : end] = tokens
        self._count = end

    def view(self) -> Tokens:
        """Return the tokens, [N] int32, without a copy; valid until the next `extend`."""
        return self._memory[: self._count]
