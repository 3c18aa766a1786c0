"""The error hierarchy. Each class defines its gRPC and HTTP status; only API servers convert errors to statuses.

    KvferryError
    ├── InvalidRequest      INVALID_ARGUMENT    400  the request is invalid; `field` names the faulty field
    ├── Unauthenticated     UNAUTHENTICATED     401  missing or unknown API key or call token
    ├── Forbidden           PERMISSION_DENIED   403  the caller's role may not call the method
    ├── UnknownModel        NOT_FOUND           404  the requested model is not served here
    ├── Overloaded          RESOURCE_EXHAUSTED  429  at capacity; retry after `retry_after_seconds`
    ├── RequestCancelled    CANCELLED           499  the caller disconnected or cancelled
    ├── Unavailable         UNAVAILABLE         503  no worker can serve the request now; safe to retry
    ├── DeadlinePassed      DEADLINE_EXCEEDED   504  the caller's deadline passed
    ├── TicketRejected      FAILED_PRECONDITION 412  a hand-off ticket is forged, stale, or for a different layout
    ├── ModelFileError      FAILED_PRECONDITION 500  a model file is missing, damaged or unsupported
    ├── UsageError          INVALID_ARGUMENT    400  a setting or flag is invalid; the process does not start
    ├── GenerationFailed    INTERNAL            500  no token could be sampled for one sequence; others continue
    ├── RequestRefused      FAILED_PRECONDITION 422  workers failed while processing the request; no retry
    ├── ResumeRefused       ABORTED             409  a stream cannot be continued where the client asks
    └── InvariantBroken     INTERNAL            500  an internal invariant is violated; the process stops cleanly

Messages contain the field, the value and the remedy, but never a secret or a prompt.
"""

import errno
import os
from typing import ClassVar

STEP_FAILED = "STEP_FAILED"
"""Value of `InvariantBroken.reason` for requests that were in the step in which an engine failed."""

NOTHING_TO_SAMPLE = "NO_TOKEN_LEFT"
CONSTRAINT_DEAD_END = "CONSTRAINT_DEAD_END"
CONSTRAINT_TOO_COMPLEX = "CONSTRAINT_TOO_COMPLEX"
ENDS_OUTPUT = frozenset({NOTHING_TO_SAMPLE, CONSTRAINT_DEAD_END, CONSTRAINT_TOO_COMPLEX})
"""Values of `InvalidRequest.reason` for requests whose output cannot continue: they may appear after tokens."""

CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
"""Value of `InvalidRequest.reason` for requests whose prompt is too long."""

_MAX_SHOWN_CHARS = 40


def encodable(text: str) -> str:
    """Return the text with unpaired surrogates escaped, which JSON and file names may have and UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def shortened(text: str) -> str:
    """Truncate a client's text to 40 characters for error messages and log lines."""
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 1] + "…"


class KvferryError(Exception):
    """Base class of all kvferry errors; only subclasses are raised."""

    grpc_status: ClassVar[str] = "UNKNOWN"
    http_status: ClassVar[int] = 500
    reason: str = "UNKNOWN"
    """Stable upper-snake-case reason for programs (`google.rpc.ErrorInfo.reason`, OpenAI's `code`)."""

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        """
        Args:
            message: names the value and the remedy, for users.
            reason: stable identifier for programs; `None` for the class's.
            field: name of the faulty request field; `None` if no single field is at fault.
            retry_after_seconds: time in seconds after which a retry may succeed; `None` if waiting alone does not help.
        """
        message = encodable(message)
        super().__init__(message)
        self.message = message
        self.field = None if field is None else encodable(field)
        """Name of the faulty request field, as the caller sent it; `None` if no single field is at fault."""
        self.retry_after_seconds = retry_after_seconds
        """Seconds after which a retry may succeed; `None` if waiting alone does not help."""
        if reason is not None:
            self.reason = reason


class InvalidRequest(KvferryError):
    """The request is invalid and must be changed before a retry."""

    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    reason = "INVALID_REQUEST"


class Unauthenticated(KvferryError):
    """The API key is missing or unknown, or an internal call has no valid token."""

    grpc_status = "UNAUTHENTICATED"
    http_status = 401
    reason = "UNAUTHENTICATED"


class Forbidden(KvferryError):
    """The caller is known, but its role may not call the method."""

    grpc_status = "PERMISSION_DENIED"
    http_status = 403
    reason = "FORBIDDEN"


class UnknownModel(KvferryError):
    """The requested model is not served here."""

    grpc_status = "NOT_FOUND"
    http_status = 404
    reason = "MODEL_NOT_FOUND"


class Overloaded(KvferryError):
    """The server is at capacity; retry after `retry_after_seconds`."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    reason = "OVERLOADED"


class RequestCancelled(KvferryError):
    """The caller disconnected or cancelled the request."""

    grpc_status = "CANCELLED"
    http_status = 499
    reason = "CANCELLED"


class Unavailable(KvferryError):
    """No worker can serve the request now; a retry is safe."""

    grpc_status = "UNAVAILABLE"
    http_status = 503
    reason = "UNAVAILABLE"


class DeadlinePassed(KvferryError):
    """The caller's deadline passed."""

    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504
    reason = "DEADLINE_EXCEEDED"


class TicketRejected(KvferryError):
    """A hand-off ticket is forged, stale, or for a different layout. The request itself is still valid."""

    grpc_status = "FAILED_PRECONDITION"
    http_status = 412
    reason = "TICKET_REJECTED"


class ModelFileError(KvferryError):
    """A model file is missing, damaged or unsupported."""

    grpc_status = "FAILED_PRECONDITION"
    http_status = 500
    reason = "MODEL_FILE"


class UsageError(KvferryError):
    """A setting or a flag is invalid."""

    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    reason = "USAGE"


class GenerationFailed(KvferryError):
    """No token could be sampled for one sequence, because its logits are not finite or its constraint does not permit
    the tokens so far; the worker continues."""

    grpc_status = "INTERNAL"
    http_status = 500
    reason = "GENERATION_FAILED"


class RequestRefused(KvferryError):
    """Several workers failed in steps that contained this request, so the request is not retried.

    Clients do not retry requests with this HTTP status.
    """

    grpc_status = "FAILED_PRECONDITION"
    http_status = 422
    reason = "WORKERS_FAILED"


class ResumeRefused(KvferryError):
    """A stream cannot be continued at the client's position, or was continued by another gateway."""

    grpc_status = "ABORTED"
    http_status = 409
    reason = "RESUME_REFUSED"


class InvariantBroken(KvferryError):
    """An internal invariant is violated. The message contains the values; the process stops instead of continuing."""

    grpc_status = "INTERNAL"
    http_status = 500
    reason = "INTERNAL"


def context_overflow(
    num_tokens: int, context_tokens: int, *, has_output: bool = True, field: str = "prompt", num_chars: int = 0
) -> InvalidRequest:
    """Return the error for a prompt that is too long.

    Clients recognize it by its code or by its words, `prompt is too long: N tokens > M maximum` and `this model's
    maximum context length is`, and shorten the conversation.

    Args:
        num_tokens: number of tokens of the prompt; at least so many if it was too long to be tokenized.
        context_tokens: context length in tokens.
        has_output: whether there must be room for at least one more token; a vector needs none.
        field: name of the request's field with the prompt.
        num_chars: number of characters of a prompt that was too long to be tokenized.
    """
    longest = context_tokens - 1 if has_output else context_tokens
    return InvalidRequest(
        f"prompt is too long: {num_tokens} tokens > {longest} maximum; this model's maximum context length is "
        f"{context_tokens} tokens{', prompt and output' if has_output else ''}; shorten the {field} by at least "
        f"{num_tokens - longest} tokens"
        + (f" (its {num_chars} characters are {num_tokens} tokens or more)" if num_chars else ""),
        field=field,
        reason=CONTEXT_LENGTH_EXCEEDED,
    )


def cannot_listen(name: str, address: str, error: OSError) -> UsageError:
    """Return the error for an address that cannot be bound.

    Args:
        name: name of the setting with the address.
        address: the address, `host:port`.
        error: the failure.
    """
    flag = "--" + name.replace("_", "-")
    remedies = {
        errno.EADDRINUSE: f"stop the process that uses the port, or let {flag} {address.rpartition(':')[0]}:0 select a "
        "free one",
        errno.EADDRNOTAVAIL: f"set {flag} to an address of this machine",
        errno.EACCES: f"ports below 1024 need privileges; set {flag} to a higher port",
    }
    # Numbers of name resolution are not those of the operating system.
    is_system = error.errno is not None and error.errno > 0
    reason = os.strerror(error.errno or 0) if is_system else error.strerror or str(error)
    remedy = remedies.get(error.errno or 0, f"set {flag} to another address")
    return UsageError(f"cannot listen on {address} ({flag}): {reason}; {remedy}", field=name)
