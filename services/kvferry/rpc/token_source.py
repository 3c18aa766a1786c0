"""The seam between text and tokens: who turns a prompt's token ids into generated ones, wherever that happens.

A gateway's source calls prefill and decode workers; a worker of role `both` asks its own engine. Everything
above (chat templates, stop strings, OpenAI's and gRPC's text interfaces) is written once, against this.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.core.ids import RequestId
from kvferry.core.sampling import FinishReason, SampledToken, SamplingParams


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One sample to generate."""

    request_id: RequestId
    """The same for all samples of a request."""
    token_ids: Sequence[int]
    """The prompt; at least one token, never changed."""
    sampling: SamplingParams
    """`max_tokens` and `seed` are set: the edge resolved both."""
    sample_index: int = 0
    tenant: str = ""
    """Whose blocks these are; empty is the default tenant."""
    arrived: float = 0.0
    """Monotonic clock reading when the request came in, seconds; timings count from it."""
    deadline: float | None = None
    """Monotonic clock reading after which the caller no longer waits; `None`: the source's own limit holds."""


@dataclass(frozen=True, slots=True)
class KvReport:
    """One choice between loading KV and computing it, and what came of it; see `KvReport` in common.proto."""

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
    """Where the time went; see `Timing` in inference.proto. Zero and empty where something did not happen."""

    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0
    """From the request's arrival."""
    handoff_seconds: float = 0.0
    connector: str = ""
    handoff_blocks: int = 0
    handoff_bytes: int = 0
    handoff_outcome: str = ""
    """`none`, `fetched`, `local`, `recomputed` or `tier`."""
    total_seconds: float = 0.0
    prefill_worker: str = ""
    decode_worker: str = ""
    resumed: int = 0
    """Times the stream moved to another worker."""
    kv: tuple[KvReport, ...] = ()
    """Where the KV came from, in the order in which workers took part."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """The tokens of one step. Timing and cached count are what is known so far, so that a stream which is stopped
    early (a stop string) can still report them."""

    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None = None
    """Set on the last event, which may be without tokens."""
    num_cached_tokens: int = 0
    """Of the prompt, not computed for this request."""
    timing: Timing = field(default_factory=Timing)
    """`total_seconds` is left to whoever ends the stream."""


class TokenSource(Protocol):
    """Generates tokens. Several streams run at once."""

    def stream(self, request: TokenRequest) -> AsyncGenerator[TokenEvent, None]:
        """Tokens in order, the last event with a finish reason.

        Closing the generator, or cancelling the task that iterates it, frees everything the stream held, here
        and upstream, before or soon after it returns.

        Raises (while iterating):
            InvalidRequest: the request can never run here.
            Overloaded: no room now.
            Unavailable: nobody can serve it, after all retries.
            DeadlinePassed: the deadline ran out first.
        """
        ...
