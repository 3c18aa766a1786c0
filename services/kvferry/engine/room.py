"""How much one step may do, and how much of that is left while it is planned."""

from collections.abc import Collection
from dataclasses import dataclass

from kvferry.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much one step may do."""

    token_budget: int = 2048
    """Tokens computed in one step over all sequences; bounds the step's time and activation memory."""
    max_chunk_tokens: int = 512
    """Tokens of one sequence in one step, so that a long prompt does not stall the streams beside it."""
    max_mixed_tokens: int = 256
    """Prompt tokens, over all prompts, in a step in which others decode: bounds the time between their tokens
    (Agrawal et al., Sarathi-Serve, 2024, section 4.2). A chunk for each of several prompts would not."""
    max_sequences: int = 64
    """Sequences that hold pages at a time."""
    reserve_share: float = 0.01
    """Share of pages that admission leaves free; without it newcomers take the last page and cause preemptions."""


class Room:
    """What a step may still take."""

    def __init__(self, limits: SchedulerLimits, running: Collection[Sequence], num_waiting: int) -> None:
        prompts = sum(s.num_tokens - s.num_computed > 1 for s in running)
        self._chunk = limits.max_chunk_tokens
        self.tokens = limits.token_budget
        self._is_mixed = prompts < len(running)
        self._of_prompts = min(self.tokens, limits.max_mixed_tokens) if self._is_mixed else self.tokens
        self._in_line = prompts + num_waiting

    def fit(self, wanted: int) -> int:
        """How many of a sequence's tokens there is room for. Beside those who decode, no prompt but the last in line
        takes more than half of what is left, so that a short one need not wait for the end of a long one."""
        most = min(wanted, self._chunk, self.tokens)
        if wanted == 1:
            return most
        share = -(-self._of_prompts // 2) if self._is_mixed and self._in_line > 1 else self._of_prompts
        return min(most, share)

    def take(self, wanted: int, count: int) -> None:
        """Use it up: `count` of the `wanted` tokens of a sequence."""
        self.tokens -= count
        if wanted > 1:
            self._of_prompts -= count
            self._in_line -= 1
