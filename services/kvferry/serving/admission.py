"""The interface between text serving and flow control: a request is admitted before its first sample starts."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from kvferry.serving.request import Caller


@dataclass(frozen=True, slots=True)
class RequestSize:
    """Size and limits of a request, over all of its prompts and samples. It is admitted with its first sample, or with
    all beams that a search runs at a time; each further sample waits for a slot of its own."""

    caller: Caller
    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt."""
    num_samples: int
    """Number of samples, or of beams, of each prompt."""
    num_running: int
    """Maximum number of samples or beams that run at a time, over all prompts."""
    max_tokens: int
    """Maximum number of output tokens of a sample; 0 if no tokens are generated."""
    is_search: bool = False
    """Whether the request is a beam search, whose steps are computed by the workers that compute prompts."""
    held_bytes: int = 0
    """Memory that the request holds while it waits, besides its tokens, in bytes."""


class Slot(Protocol):
    """Admission of one request: entering waits until the request may start, and leaving frees what it holds. A
    protocol, because text serving must not import the gateway, which implements it."""

    def admitted(self, caller: Caller) -> Caller:
        """Return the caller with the time that the request has waited, and with its priority in its tenant's range."""
        ...

    async def __aenter__(self) -> "Slot":
        """Wait until the request may start. Cancelling the calling task leaves the queue at once.

        Raises:
            Overloaded: a quota is used up, or the queue is full.
            Forbidden: the tenant may not use the request's priority.
            DeadlinePassed: the deadline passed in the queue.
            Unavailable: the pool had no workers for too long.
        """
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free what the request holds."""
        ...

    def sample_slot(self, sample: int) -> AbstractAsyncContextManager[None]:
        """Return a context in which a sample has a slot; entering it waits for one.

        Args:
            sample: index of the prompt * `num_samples` + index of the sample.

        Raises:
            DeadlinePassed: when the context is entered: the deadline passed in the queue.
            Unavailable: the pool had no workers for too long.
        """
        ...

    def handed_out(self) -> None:
        """Note that a part of the output was given to the client's task, which sends it."""
        ...

    def taken(self) -> None:
        """Note that the client's task asks for the next part."""
        ...

    def record_tokens(self, sample: int, count: int) -> None:
        """Record output tokens of a sample; its prompt has then been computed.

        Args:
            sample: index of the prompt * `num_samples` + index of the sample.
            count: number of new output tokens.
        """
        ...

    def record_usage(self, sample: int, cached_tokens: int) -> None:
        """Record how many prompt tokens of a sample were cached: when it ends, or for a beam after each token.

        Args:
            sample: index of the prompt * `num_samples` + index of the sample.
            cached_tokens: number of leading tokens of its prompt.
        """
        ...

    def record_recomputed(self, count: int) -> None:
        """Count tokens of beams whose KV was computed again for a step."""
        ...


class RequestAdmission(Protocol):
    """Decides which requests may start, and when."""

    def enter(self, work: RequestSize) -> Slot:
        """Return a request's slot, which holds nothing until it is entered."""
        ...

    def count(self, tenant: str) -> None:
        """Count a request that computes no tokens.

        Raises:
            Overloaded: the tenant's quota of requests is used up.
        """
        ...

    def check_quota(self, tenant: str) -> None:
        """Check that the tenant may send another request, without counting it.

        Raises:
            Overloaded: the tenant's quota of requests is used up.
        """
        ...

    def check_model(self, tenant: str, model: str) -> None:
        """Check that the tenant may use a model.

        Raises:
            UnknownModel: the tenant has no access to the model.
        """
        ...
