"""The only words between scheduler and runner: what to compute in one step, and what came out.

token_ids   [ p0 p1 p2 p3 | g0 g1 ]     all tokens so far, prompt then generated; N of them
positions     0  1  2  3    4  5
              ^ num_computed = C          KV of positions < C is in the pages
              [=======)                   this step computes positions C .. C+num_scheduled-1
samples       true only if C + num_scheduled == N: the last row's logits give the next token
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.core.ids import BlockId, RequestId
from kvferry.core.sampling import SampledToken, SamplingParams
from kvferry.engine.allocation import PageCopy


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step. The lists are the scheduler's own and must not be changed or kept."""

    request_id: RequestId
    token_ids: Sequence[int]
    """All tokens so far, prompt then generated."""
    num_prompt: int
    """How many of them were prompted; penalties count the others."""
    num_computed: int
    num_scheduled: int
    """At least 1."""
    block_ids: Sequence[BlockId]
    """Pages in order of position; enough of them for num_computed + num_scheduled tokens."""
    samples: bool
    sampling: SamplingParams
    sample_index: int
    """Which of the request's `n` samples; the random stream."""
    banned_token_ids: Sequence[int] = ()
    """Not to be drawn in this step (end tokens before `min_tokens`)."""
    table_version: int = 0
    """While it stays, `block_ids` only grew since an earlier step; 0: nobody knows."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work. Empty when nothing can run."""

    scheduled: tuple[ScheduledSequence, ...]
    copies: tuple[PageCopy, ...] = ()
    """Whole pages to copy before anything is written."""

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes, over all sequences."""
        return sum(s.num_scheduled for s in self.scheduled)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced: a token for each sequence that sampled."""

    tokens: Mapping[RequestId, SampledToken]
