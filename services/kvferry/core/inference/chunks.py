"""Chunks of generated text, with the usage and timing of their sample."""

from dataclasses import dataclass

from kvferry.core.inference.tool_calls import CallDelta
from kvferry.core.pausing import VersionRuns
from kvferry.core.retention import Retention
from kvferry.core.sampling import FinishReason, SampledToken, ScoredToken

StopReason = str | int | None
"""The stop string or stop token id that ended the output; `None` if neither did."""


@dataclass(frozen=True, slots=True)
class KvReport:
    """A decision whether to load or compute KV, and its outcome; see `KvReport` in common.proto."""

    worker_id: str
    source: str
    first_token: int = 0
    num_tokens: int = 0
    num_chosen: int = 0
    num_bytes: int = 0
    expected_load_seconds: float = 0.0
    expected_compute_seconds: float = 0.0
    is_forced: bool = False
    blocks_loaded: int = 0
    bytes_loaded: int = 0
    load_seconds: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Timing:
    """Timing of a sample; see `Timing` in inference.proto. Fields for phases that did not occur are zero or empty."""

    queue_seconds: float = 0.0
    """Seconds in queues before the prompt's computation: in the gateway, and in the worker that computes the prompt."""
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0
    """Seconds from the request's arrival to the first token."""
    handoff_seconds: float = 0.0
    connector: str = ""
    handoff_blocks: int = 0
    handoff_bytes: int = 0
    handoff_outcome: str = ""
    """Outcome of the hand-off, a value of `HandoffOutcome`; empty if the request has none."""
    total_seconds: float = 0.0
    prefill_worker: str = ""
    decode_worker: str = ""
    resumed: int = 0
    """Number of times that the stream resumed on a different worker."""
    kv: tuple[KvReport, ...] = ()
    """Reports on the source of the KV, in the order of the workers involved."""
    retention: Retention | None = None
    """What the worker that computed the prompt granted; `None` if the request asked for no retention."""
    weight_versions: VersionRuns = ()
    """The versions of the weights that made the tokens, each with the index of its first token."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a sample."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Number of prompt tokens whose KV was in a prefix cache or loaded from a tier or another worker, so that it was
    not computed for this request."""
    unreturned_tokens: int = 0
    """Number of tokens of beams that are not among the outputs; in the first output of a beam search."""
    reasoning_tokens: int = 0
    """Number of output tokens of the reasoning, with its marks."""
    cache_write_tokens: int = 0
    """Number of prompt tokens whose KV was computed and put in a prefix cache."""
    loaded_tokens: int = 0
    """Number of the cached tokens whose KV was loaded from a tier or another worker; known to the gateway only."""


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Text and tokens that a step added to a sample."""

    index: int
    """Index of the sample, from 0."""
    text: str
    """Text of complete characters; lags behind `tokens` while its end may be the start of a stop string or of a tool
    call."""
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None = None
    """Reason why the sample ended; set in its last chunk, together with `usage` and `timing`."""
    usage: Usage | None = None
    timing: Timing | None = None
    stop_reason: StopReason = None
    """The stop string or stop token id that ended the sample; set only in its last chunk."""
    prompt_logprobs: tuple[ScoredToken, ...] | None = None
    """Log-probabilities of the prompt's tokens from the second one on; in a sample's first chunk, if requested."""
    reasoning: str = ""
    """Reasoning before the answer, if it is split off."""
    tool_calls: tuple[CallDelta, ...] = ()
    """Parts of tool calls, in the order of the calls."""

    def calls_around_text(self) -> tuple[tuple[CallDelta, ...], tuple[CallDelta, ...]]:
        """Return the parts of calls that come before the text, since they continue an earlier call, and the others."""
        count = next((number for number, call in enumerate(self.tool_calls) if call.name), len(self.tool_calls))
        return self.tool_calls[:count], self.tool_calls[count:]
