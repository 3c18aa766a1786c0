"""Remaining budget of a step while it is being planned."""

from collections.abc import Collection

from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.schedule.step.sampling_state import SamplingState
from kvferry.engine.schedule.step.sequence import Sequence
from kvferry.engine.schedule.step.step import is_decode


class StepBudget:
    """Remaining budget of a step while it is being planned."""

    def __init__(
        self, limits: SchedulerLimits, running: Collection[Sequence], num_waiting: int, background: int | None = None
    ) -> None:
        """
        Args:
            limits: limits of a step.
            running: the running sequences that take part.
            num_waiting: number of waiting sequences.
            background: maximum number of tokens of background sequences; `None` for no further limit.
        """
        prompts = sum(not is_decode(s.num_uncomputed) for s in running)
        self._chunk = limits.max_chunk_tokens
        self.tokens = limits.token_budget
        self._scored_rows = limits.max_scored_rows
        self._is_mixed = prompts < len(running)
        self._of_prompts = min(self.tokens, limits.max_mixed_tokens) if self._is_mixed else self.tokens
        self._in_line = prompts + num_waiting
        self._of_background = self.tokens if background is None else background

    def fit(self, num_uncomputed: int, *, in_background: bool = False) -> int:
        """Return how many of a sequence's uncomputed tokens fit. If other sequences decode, every prompt but the last
        takes at most half of the remaining budget, so that a short prompt does not wait for the end of a long
        prompt."""
        max_tokens = min(num_uncomputed, self._chunk, self.tokens)
        if in_background:
            max_tokens = min(max_tokens, self._of_background)
        if is_decode(num_uncomputed):
            return max_tokens
        share = -(-self._of_prompts // 2) if self._is_mixed and self._in_line > 1 else self._of_prompts
        return min(max_tokens, share)

    def fit_drafts(self, count: int, *, in_background: bool) -> int:
        """Return how many draft tokens fit behind `count` tokens of a sequence."""
        return max(0, (min(self.tokens, self._of_background) if in_background else self.tokens) - count)

    def fit_scored(self, sampling: SamplingState, start: int, count: int) -> int:
        """Return how many of `count` tokens from position `start` fit if the rows of the prompt are scored.

        Args:
            sampling: sampling state of the sequence.
            start: position of the first token to compute.
            count: number of tokens to compute.
        """
        excess = sampling.scored_in(start, count) - self._scored_rows
        if excess <= 0:
            return count
        return max(start, sampling.num_scored) + self._scored_rows - start

    def take(self, num_uncomputed: int, count: int, num_scored: int = 0, *, in_background: bool = False) -> None:
        """Consume budget for `count` of a sequence's uncomputed tokens, of which `num_scored` have scored rows.

        Args:
            num_uncomputed: number of the sequence's uncomputed tokens; 1 if it decodes.
            count: number of them that the step computes.
            num_scored: number of scored rows among them.
            in_background: whether it is a background sequence.
        """
        self.tokens -= count
        if in_background:
            self._of_background = max(0, self._of_background - count)
        self._scored_rows -= num_scored
        if not is_decode(num_uncomputed):
            self._of_prompts -= count
            self._in_line -= 1
