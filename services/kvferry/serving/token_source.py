"""The interface between text serving and generation: takes a prompt's token ids, yields generated tokens.

A gateway's source calls prefill and decode workers; the source of a worker of role `both` uses its own engine. Chat
templates, stop strings and the text APIs depend only on this interface.
"""

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.core.inference.chunks import Timing
from kvferry.core.inference.pooling import PoolingParams
from kvferry.core.sampling import FinishReason, SampledToken, ScoredToken
from kvferry.serving.request import Request


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """The tokens of a step. `timing` and `num_cached_tokens` have the values known so far, for streams that are stopped
    early by a stop string."""

    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None = None
    """Reason why the sample ended; set on the last event, which may have no tokens."""
    num_cached_tokens: int = 0
    """Number of prompt tokens whose KV was in a prefix cache or loaded from a tier or another worker, so that it was
    not computed for this request."""
    timing: Timing = field(default_factory=Timing)
    """Timing so far; `total_seconds` is set on the last event."""
    prompt_logprobs: tuple[ScoredToken, ...] | None = None
    """Log-probabilities of the prompt's tokens from the second one on; on the first event, if they were requested."""
    num_written_tokens: int = 0
    """Number of prompt tokens whose KV was computed and put in a prefix cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """Pooled vector of one prompt."""

    values: npt.NDArray[np.float32]
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    """Number of prompt tokens whose KV was cached or loaded."""


class VectorSource(Protocol):
    """Computes pooled vectors; supports concurrent calls."""

    async def pool(self, request: Request, params: PoolingParams) -> Vector:
        """Compute the vector of a prompt. Cancelling the calling task releases all resources of the call.

        Args:
            request: the prompt; its sampling parameters have no effect.
            params: parameters of the vector.

        Raises:
            KvferryError: see `TokenSource.stream`.
        """
        ...


class TokenSource(Protocol):
    """Generates tokens; supports concurrent streams."""

    def stream(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Yield tokens in order; the last event has a finish reason.

        Closing the generator, or cancelling the task that iterates over it, releases all local and remote resources of
        the stream, at the latest shortly after closing returns.

        Raises:
            InvalidRequest: while iterating: the request cannot be served with this model.
            Overloaded: while iterating: the source is at capacity.
            Unavailable: while iterating: no worker can serve the request, after all retries.
            DeadlinePassed: while iterating: the deadline passed.
        """
        ...


class SearchSource(Protocol):
    """Computes the steps of beam searches as parts of one request. A protocol, because text serving must import
    neither the gateway's dispatcher, which implements it, nor the engine."""

    def search(self, request: Request, width: int) -> AbstractContextManager[TokenSource]:
        """Open a beam search for the length of a `with` block, which yields the source of its steps.

        Args:
            request: the prompt; `max_tokens` is the limit of the search.
            width: number of beams, and so of steps at a time.

        Raises:
            Overloaded: the source is at capacity. The steps are not refused for this reason.
        """
        ...
