"""Step limits (tokens, sequences, chunks), and the remaining budget while a step is being planned."""

from collections.abc import Collection
from dataclasses import dataclass

from kvferry.engine.schedule.policies.class_weights import Weights, read_weights, weights_in_use
from kvferry.engine.schedule.ranges import check_ranges, check_share
from kvferry.engine.schedule.step.sampling_state import SamplingState
from kvferry.engine.schedule.step.sequence import Sequence
from kvferry.engine.schedule.step.step import is_decode


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of one step."""

    token_budget: int = 2048
    """Maximum number of tokens in a step, over all sequences; bounds the step's time and activation memory."""
    max_chunk_tokens: int = 512
    """Maximum number of tokens of one sequence in a step, so that a long prompt does not stall other streams."""
    max_mixed_tokens: int = 256
    """Maximum number of prompt tokens, over all prompts, in a step in which other sequences decode; bounds their
    inter-token latency (Agrawal et al., Sarathi-Serve, 2024, section 4.2)."""
    max_sequences: int = 64
    """Maximum number of sequences that hold pages."""
    scheduling: str = "fcfs"
    """Scheduling policy, a key of `policies.policy.POLICIES`."""
    class_weights: str = ""
    """Weights of priorities for the policy `weighted`, as `PRIORITY=WEIGHT,...`; other priorities have weight 1."""
    max_scored_rows: int = 64
    """Maximum number of prompt rows in a step whose logits are computed for `prompt_logprobs`; bounds the memory of
    logits."""
    reserve_share: float = 0.01
    """Share of pages that admission leaves free; without it, new sequences would take the last page and cause
    preemptions."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            UsageError: a number is out of range, or `class_weights` is invalid or has no effect.
        """
        check_ranges(self, "token_budget", "max_chunk_tokens", "max_mixed_tokens", "max_sequences", "max_scored_rows")
        check_share("reserve_share", self.reserve_share, may_be_zero=True)
        weights_in_use(self.scheduling, self.class_weights)

    @property
    def weights(self) -> Weights:
        """Weights by priority."""
        return read_weights(self.class_weights)

    @property
    def step_tokens(self) -> int:
        """Maximum number of tokens of one sequence in a step, without draft tokens."""
        return min(self.max_chunk_tokens, self.token_budget)


class StepBudget:
    """Remaining budget of a step while it is being planned."""

    def __init__(self, limits: SchedulerLimits, running: Collection[Sequence], num_waiting: int) -> None:
        prompts = sum(not is_decode(s.num_uncomputed) for s in running)
        self._chunk = limits.max_chunk_tokens
        self.tokens = limits.token_budget
        self._scored_rows = limits.max_scored_rows
        self._is_mixed = prompts < len(running)
        self._of_prompts = min(self.tokens, limits.max_mixed_tokens) if self._is_mixed else self.tokens
        self._in_line = prompts + num_waiting

    def fit(self, num_uncomputed: int) -> int:
        """Return how many of a sequence's uncomputed tokens fit. If other sequences decode, every prompt but the last
        takes at most half of the remaining budget, so that a short prompt does not wait for the end of a long
        prompt."""
        max_tokens = min(num_uncomputed, self._chunk, self.tokens)
        if is_decode(num_uncomputed):
            return max_tokens
        share = -(-self._of_prompts // 2) if self._is_mixed and self._in_line > 1 else self._of_prompts
        return min(max_tokens, share)

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

    def take(self, num_uncomputed: int, count: int, num_scored: int = 0) -> None:
        """Consume budget for `count` of a sequence's uncomputed tokens, of which `num_scored` have scored rows.

        Args:
            num_uncomputed: number of the sequence's uncomputed tokens; 1 if it decodes.
            count: number of them that the step computes.
            num_scored: number of scored rows among them.
        """
        self.tokens -= count
        self._scored_rows -= num_scored
        if not is_decode(num_uncomputed):
            self._of_prompts -= count
            self._in_line -= 1
