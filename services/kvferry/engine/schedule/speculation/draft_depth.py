"""Number of tokens that a draft model proposes: as many as increase the expected output tokens per second. Pure.

A draft model needs one step per token, so the number is chosen before it runs, from the share of its tokens that were
accepted (Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023, section 3.3), the price of
its steps and the price of the rows that verify them:

    rate(m)  =  sequences * (1 + p + .. + p^m)  /  (seconds of a step of (rows + sequences * m) rows  +  m draft steps)
"""

from collections.abc import Callable

_MIN_ADVANTAGE = 1.05
"""Minimum factor by which drafts must be estimated to increase the rate."""
_FIRST_DEPTH = 4
"""Number of tokens to propose before any draft step was measured."""
_PROBE_DEPTH = 2
_FIRST_PAUSE, _MAX_PAUSE = 64, 512
"""Minimum and maximum number of steps without drafts before the engine drafts again to measure; the pause doubles each
time."""


class DraftDepth:
    """Chooses the number of draft tokens of an engine's steps."""

    def __init__(self, limit: int, *, is_fixed: bool = False) -> None:
        """
        Args:
            limit: maximum number of tokens.
            is_fixed: whether the number is always `limit`.
        """
        self._limit, self.is_fixed = limit, is_fixed
        self._pause, self._left = _FIRST_PAUSE, _FIRST_PAUSE

    def choose(
        self,
        sequences: int,
        rows: int,
        probability: float,
        verify: Callable[[int], float],
        draft: Callable[[int], float] | None,
    ) -> int:
        """Return the number of tokens to propose for each sequence.

        Args:
            sequences: number of sequences that can be drafted, at least 1.
            rows: number of rows of the step without drafts.
            probability: probability that a draft token is accepted, given that the earlier ones are.
            verify: estimated duration of a step in seconds, by its number of rows.
            draft: estimated duration of a draft step in seconds, by its number of rows; `None` before one was measured.
        """
        if self.is_fixed:
            return self._limit
        if draft is None:
            return min(_FIRST_DEPTH, self._limit)
        best = self._best(sequences, rows, probability, verify, draft(sequences))
        return best or (min(_PROBE_DEPTH, self._limit) if self._left <= 0 else 0)

    def advance(self, depth: int) -> None:
        """Record that a step was planned.

        Args:
            depth: number of draft tokens of each sequence; 0 for a step without drafts.
        """
        if depth == 0:
            self._left -= 1
        elif self._left <= 0:
            self._pause = self._left = min(2 * self._pause, _MAX_PAUSE)

    def _best(
        self, sequences: int, rows: int, probability: float, verify: Callable[[int], float], draft_seconds: float
    ) -> int:
        best, best_rate = 0, _MIN_ADVANTAGE / verify(rows)
        expected = gain = 1.0
        for depth in range(1, self._limit + 1):
            gain *= probability
            expected += gain
            rate = expected / (verify(rows + sequences * depth) + depth * draft_seconds)
            if rate > best_rate:
                best, best_rate = depth, rate
        return best
