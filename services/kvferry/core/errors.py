"""The error tree. Each class names its gRPC status and its HTTP status; edges translate, nobody else does.

    KvferryError
    ├── InvalidRequest      INVALID_ARGUMENT    400  the request can never work as it stands; `field` names the part
    ├── Unauthenticated     UNAUTHENTICATED     401  no key, or one that nobody issued
    ├── UnknownModel        NOT_FOUND           404  the model asked for is not served here
    ├── Overloaded          RESOURCE_EXHAUSTED  429  no room now; `retry_after_seconds` says when to come back
    ├── RequestCancelled    CANCELLED           499  the caller went away or asked to stop
    ├── Unavailable         UNAVAILABLE         503  nobody can serve this now; safe to retry
    ├── DeadlinePassed      DEADLINE_EXCEEDED   504  the caller's deadline ran out
    ├── TicketRejected      FAILED_PRECONDITION 412  a hand-off ticket is forged, stale, or for another layout
    ├── ModelFileError      FAILED_PRECONDITION 500  a model file is missing, damaged or not understood
    ├── UsageError          INVALID_ARGUMENT    400  a setting or flag is wrong; the process does not start
    └── InvariantBroken     INTERNAL            500  we broke our own promise; the process stops cleanly

A message says what was wrong with which value and what to do about it. It never holds a secret or a prompt.
"""

from typing import ClassVar


class KvferryError(Exception):
    """Root of the tree; never raised itself."""

    grpc_status: ClassVar[str] = "UNKNOWN"
    http_status: ClassVar[int] = 500
    reason: str = "UNKNOWN"
    """Stable upper-snake-case word for programs (`google.rpc.ErrorInfo.reason`, OpenAI's `code`)."""

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        """The part of the request at fault, in the caller's own words; `None` when no one part is."""
        self.retry_after_seconds = retry_after_seconds
        """When a retry has a chance; `None` when waiting alone will not help."""
        if reason is not None:
            self.reason = reason


class InvalidRequest(KvferryError):
    """The request can never work as it stands."""

    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    reason = "INVALID_REQUEST"


class Unauthenticated(KvferryError):
    """No API key, or one that nobody issued."""

    grpc_status = "UNAUTHENTICATED"
    http_status = 401
    reason = "UNAUTHENTICATED"


class UnknownModel(KvferryError):
    """The model asked for is not served here."""

    grpc_status = "NOT_FOUND"
    http_status = 404
    reason = "MODEL_NOT_FOUND"


class Overloaded(KvferryError):
    """No room now; come back later."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    reason = "OVERLOADED"


class RequestCancelled(KvferryError):
    """The caller went away or asked to stop."""

    grpc_status = "CANCELLED"
    http_status = 499
    reason = "CANCELLED"


class Unavailable(KvferryError):
    """Nobody can serve this now; a retry is safe."""

    grpc_status = "UNAVAILABLE"
    http_status = 503
    reason = "UNAVAILABLE"


class DeadlinePassed(KvferryError):
    """The caller's deadline ran out."""

    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504
    reason = "DEADLINE_EXCEEDED"


class TicketRejected(KvferryError):
    """A hand-off ticket is forged, stale, or describes another layout. The request itself is still good."""

    grpc_status = "FAILED_PRECONDITION"
    http_status = 412
    reason = "TICKET_REJECTED"


class ModelFileError(KvferryError):
    """A model file is missing, damaged or not understood."""

    grpc_status = "FAILED_PRECONDITION"
    http_status = 500
    reason = "MODEL_FILE"


class UsageError(KvferryError):
    """A setting or a flag is wrong."""

    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    reason = "USAGE"


class InvariantBroken(KvferryError):
    """We broke our own promise. The message carries the numbers; the process stops rather than guess."""

    grpc_status = "INTERNAL"
    http_status = 500
    reason = "INTERNAL"
