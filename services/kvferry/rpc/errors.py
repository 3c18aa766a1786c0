"""KvferryError to a gRPC status with `google.rpc` details, and back.

What travels beside code and message: `ErrorInfo` (a stable reason), `BadRequest` (the field at fault) and
`RetryInfo` (when to come back). A client that knows only gRPC still gets the right code and a readable message.
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
    InvalidRequest,
    InvariantBroken,
    KvferryError,
    ModelFileError,
    Overloaded,
    RequestCancelled,
    TicketRejected,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    UsageError,
)

DOMAIN = "kvferry.dev"
DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_CHARS = 1024
"""A status travels in HTTP/2 headers, of which a peer accepts 8 KiB."""

Trailers = tuple[tuple[str, str | bytes], ...]

_BY_STATUS: dict[str, type[KvferryError]] = {
    kind.grpc_status: kind
    for kind in (
        InvalidRequest,
        Unauthenticated,
        UnknownModel,
        Overloaded,
        RequestCancelled,
        Unavailable,
        DeadlinePassed,
        TicketRejected,
        InvariantBroken,
    )
}
# Some statuses mean several errors; the reason tells which.
_BY_REASON: dict[str, type[KvferryError]] = {kind.reason: kind for kind in (ModelFileError, UsageError)}


def status_of(error: KvferryError) -> tuple[grpc.StatusCode, str, Trailers]:
    """Code, message and trailing metadata that carry `error`; what `ServicerContext.abort` takes."""
    code = grpc.StatusCode[error.grpc_status]
    message = _shorten(error.message)
    status = status_pb2.Status(code=code.value[0], message=message, details=list(_details(error)))
    return code, message, ((DETAILS_KEY, status.SerializeToString()),)


def error_from_rpc(error: grpc.RpcError) -> KvferryError:
    """The error that a failed call stands for, from its details where it has them, else from its code.

    Takes what the synchronous and the asyncio client raise. A status that we do not use becomes `Unavailable`
    when nothing answered, `InvariantBroken` otherwise.
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
    trailers = cast("Trailers", error.trailing_metadata() or ())  # the stubs of the two clients disagree
    for key, value in trailers:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return tuple(status_pb2.Status.FromString(value).details)
            except DecodeError:  # not ours; code and message still hold
                return ()
    return ()


def _shorten(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 1] + "…"
