"""Decides whether and where a sample is retried after a failed call to a worker. No I/O."""

from enum import StrEnum

from kvferry.core.errors import (
    GenerationFailed,
    InvariantBroken,
    KvferryError,
    ModelFileError,
    Overloaded,
    RequestCancelled,
    TicketRejected,
    Unavailable,
    UnknownModel,
)


class RetryDecision(StrEnum):
    """How a sample continues after a failed call to a worker."""

    FATAL = "fatal"
    """Do not retry: the request would fail on any worker."""
    ELSEWHERE = "elsewhere"
    """Retry on a different worker: this worker is at capacity or failed only this sample."""
    SUSPECT = "suspect"
    """Retry, preferably on a different worker: this worker is broken or unreachable."""
    DROP_TICKET = "drop_ticket"
    """Retry without the ticket: the worker works, but the ticket is invalid."""


def retry_decision(error: KvferryError) -> RetryDecision:
    """Return how a sample continues after the error of a call to a worker."""
    match error:
        case TicketRejected():
            return RetryDecision.DROP_TICKET
        case Overloaded() | GenerationFailed():
            return RetryDecision.ELSEWHERE
        case UnknownModel(reason="ADAPTER_NOT_LOADED"):
            return RetryDecision.ELSEWHERE  # the worker has replaced or removed it since its last status
        case Unavailable() | RequestCancelled() | InvariantBroken() | ModelFileError():
            # CANCELLED without a local cancellation: the server is shutting down.
            return RetryDecision.SUSPECT
        case _:
            return RetryDecision.FATAL
