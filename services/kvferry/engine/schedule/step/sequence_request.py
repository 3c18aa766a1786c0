"""What a sequence was asked to generate."""

from dataclasses import dataclass

from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import AdapterId, RequestId
from kvferry.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """The request of one sequence; never changes."""

    request_id: RequestId
    num_prompt: int
    sampling: SamplingParams
    namer: BlockNamer
    max_tokens_total: int
    """Limit on N: the smaller of the context length and the number of prompt tokens plus max_tokens."""
    eos_token_ids: frozenset[int]
    sample_index: int = 0
    priority: int = 0
    """Priority of the request; lower numbers come first, in policies that compare priorities."""
    latest_start: float | None = None
    """Time after which the deadline can no longer be met, monotonic seconds; a sequence that waits longer is
    refused. `None` without a deadline."""
    scope: str = ""
    adapter: AdapterId | None = None
    exports: bool = False
    """Whether to stop after one token and export the pages (on a prefill worker)."""
    keeps: bool = False
    """Whether to report the pages of the full blocks at the end, so that peers can read them while they are cached."""
