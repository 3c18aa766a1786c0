"""Converts between `KvferryError` and gRPC statuses with `google.rpc` details.

Besides code and message, a status has the details `ErrorInfo` (a stable reason), `BadRequest` (the faulty field) and
`RetryInfo` (the retry delay). Clients that ignore the details still receive the correct code and a readable message.
"""

from collections.abc import Iterator
from typing import cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from kvferry.core.errors import (
    DeadlinePassed,
    Forbidden,
    GenerationFailed,
    InvalidRequest,
    InvariantBroken,
    KvferryError,
    ModelFileError,
    Overloaded,
    RequestCancelled,
    RequestRefused,
    ResumeRefused,
    TicketRejected,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    UsageError,
)

DOMAIN = "kvferry.dev"
DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_CHARS = 1024
"""Message length limit: a status is sent in HTTP/2 headers, and peers accept 8 KiB of headers."""

Trailers = tuple[tuple[str, str | bytes], ...]

_BY_STATUS: dict[str, type[KvferryError]] = {
    kind.grpc_status: kind
    for kind in (
        InvalidRequest,
        Unauthenticated,
        Forbidden,
        UnknownModel,
        Overloaded,
        RequestCancelled,
        Unavailable,
        DeadlinePassed,
        TicketRejected,
        InvariantBroken,
    )
}
# Several classes share a status; the reason distinguishes them.
_BY_REASON: dict[str, type[KvferryError]] = {
    kind.reason: kind for kind in (ModelFileError, UsageError, GenerationFailed, RequestRefused, ResumeRefused)
}


def status_of(error: KvferryError) -> tuple[grpc.StatusCode, str, Trailers]:
    """Return the code, message and trailing metadata of `error`: the arguments of `ServicerContext.abort`."""
    code = grpc.StatusCode[error.grpc_status]
    message = _shorten(error.message)
    status = status_pb2.Status(code=code.value[0], message=message, details=list(_details(error)))
    return code, message, ((DETAILS_KEY, status.SerializeToString()),)


def error_from_rpc(error: grpc.RpcError) -> KvferryError:
    """Convert a failed call's status to a `KvferryError`, using its details if present, or else its code.

    Accepts errors of both the blocking and the asyncio client. A status that kvferry does not use becomes `Unavailable`
    if the peer did not respond, otherwise `InvariantBroken`.
    """
    code: grpc.StatusCode = error.code()
    message: str = error.details() or code.name
    details = _read_details(error)
    reason: str | None = None
    field: str | None = None
    retry_after: float | None = None
    for detail in details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            reason = info.reason if info.domain == DOMAIN else None
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            field = bad.field_violations[0].field if bad.field_violations else None
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    kind = _BY_REASON.get(reason or "") or _BY_STATUS.get(code.name, InvariantBroken)
    return kind(message, reason=reason, field=field, retry_after_seconds=retry_after)


def _details(error: KvferryError) -> Iterator[AnyMessage]:
    yield _pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=_shorten(error.message), reason=error.reason
        )
        yield _pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_seconds is not None:
        delay = Duration()
        delay.FromNanoseconds(max(0, round(error.retry_after_seconds * 1e9)))
        yield _pack(error_details_pb2.RetryInfo(retry_delay=delay))


def _pack(message: object) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)  # type: ignore[arg-type]  # google.rpc has no stubs
    return packed


def _read_details(error: grpc.RpcError) -> tuple[AnyMessage, ...]:
    trailers = cast("Trailers", error.trailing_metadata() or ())  # the stubs of the two clients differ
    for key, value in trailers:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return tuple(status_pb2.Status.FromString(value).details)
            except DecodeError:  # details from a different kind of server; code and message still apply
                return ()
    return ()


def _shorten(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 1] + "…"
