"""Server interceptor: converts errors to statuses, counts calls in flight, closes response streams.

It also rejects malformed requests; by default, gRPC would return UNKNOWN and log a stack trace for each.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import aclosing
from functools import cache
from typing import Any, Never, cast

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import DecodeError

from kvferry.core.errors import InvalidRequest, InvariantBroken, KvferryError
from kvferry.rpc.errors import status_of
from kvferry.rpc.message_elements import check_num_elements
from kvferry.rpc.wire import MAX_REQUEST_ID_CHARS

_log = logging.getLogger(__name__)

_OWN_PREFIX = "/kvferry."
_SERVED_PREFIXES = (_OWN_PREFIX, "/envoy.service.ext_proc.v3.")
"""Prefixes of the methods whose calls are counted: kvferry's own, and those of Envoy's protocol that it serves."""
STARTED_METADATA = (("kvferry-started", "1"),)
"""Initial metadata of `Prefill.Run` and `Decode.Run`, sent before the first step that includes the request."""
_LASTING_PREFIX = "/kvferry.v1.KvEvents/"
"""Method prefix of long-lived subscriptions, which do not count as calls in flight."""
_QUIET_HTTP_STATUS = 500
"""Errors with a lower HTTP status are the caller's fault and are logged at a lower level."""


_NOT_OF_THE_CALL = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""Exceptions that do not come from the handler. All others end the call with a status, including exceptions of
extensions that do not derive from `Exception`."""


class OpenCalls:
    """Counts the calls in flight to kvferry's services."""

    def __init__(self) -> None:
        self.count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        self.count += 1
        self._idle.clear()

    def leave(self) -> None:
        self.count -= 1
        if self.count == 0:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Return when no call is in flight."""
        await self._idle.wait()


class _Unread:
    """Placeholder for a message that was not parsed."""

    def __init__(self, error: InvalidRequest) -> None:
        self.error = error


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Server interceptor that wraps all handlers; for health and reflection, it only rejects malformed requests."""

    def __init__(self, calls: OpenCalls) -> None:
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return handler
        is_counted = method.startswith(_SERVED_PREFIXES) and not method.startswith(_LASTING_PREFIX)
        calls = self._calls if is_counted else OpenCalls()
        codecs = {
            "request_deserializer": _reader(handler.request_deserializer, _input_type(method)),
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._unary(method, handler.unary_unary, calls), **codecs)
        if handler.unary_stream is not None:
            # Health's Watch is a coroutine that writes to its own stream.
            wrap = self._stream if method.startswith(_OWN_PREFIX) else self._unary
            return grpc.unary_stream_rpc_method_handler(wrap(method, handler.unary_stream, calls), **codecs)
        if handler.stream_stream is not None:
            wrapped = self._stream(method, handler.stream_stream, calls)
            return grpc.stream_stream_rpc_method_handler(wrapped, **codecs)
        return handler

    def _unary(self, method: str, inner: Callable[..., Any], calls: OpenCalls) -> Callable[..., Any]:
        async def call(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> object:
            calls.enter()
            try:
                result = inner(_checked(request), context)
                return await result if inspect.isawaitable(result) else result
            except _NOT_OF_THE_CALL:
                raise
            except BaseException as error:
                await _abort(error, method, request, context)
            finally:
                calls.leave()

        return call

    def _stream(self, method: str, inner: Callable[..., Any], calls: OpenCalls) -> Callable[..., Any]:
        # A coroutine, not a generator: if a call is cancelled during a write, a generator stays suspended until it is
        # garbage collected, so its `finally` block runs late.
        async def call(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            calls.enter()
            try:
                async with aclosing(
                    cast("AsyncGenerator[object, None]", inner(_checked(request), context))
                ) as messages:
                    async for message in messages:
                        await context.write(message)
            except _NOT_OF_THE_CALL:
                raise
            except BaseException as error:
                await _abort(error, method, request, context)
            finally:
                calls.leave()

        return call


@cache
def _input_type(method: str) -> Descriptor | None:
    """Return the type of a method's requests; `None` for services of other projects."""
    service, _, name = method.removeprefix("/").rpartition("/")
    if not method.startswith(_OWN_PREFIX):
        return None
    input_type: Descriptor = Default().FindServiceByName(service).methods_by_name[name].input_type
    return input_type


def _reader(read: Callable[[bytes], object] | None, message: Descriptor | None) -> Callable[[bytes], object] | None:
    """Return a deserializer that returns `_Unread` where `read` fails, since gRPC would log a stack trace."""

    def read_or_mark(data: bytes) -> object:
        assert read is not None
        try:
            if message is not None:
                check_num_elements(data, message)
            return read(data)
        except InvalidRequest as error:
            return _Unread(error)
        except DecodeError:
            return _Unread(
                InvalidRequest(
                    f"the request's {len(data)} bytes are not a valid message of this method; see proto/kvferry/v1",
                    reason="MALFORMED_MESSAGE",
                )
            )

    return None if read is None else read_or_mark


def _checked(request: object) -> object:
    """Return `request`, or a stream that checks each of its messages.

    Raises:
        InvalidRequest: the message was not parsed.
    """
    if isinstance(request, _Unread):
        raise request.error
    return _checked_each(request) if isinstance(request, AsyncIterable) else request


async def _checked_each(requests: AsyncIterable[object]) -> AsyncGenerator[object, None]:
    async for request in requests:
        yield _checked(request)


def request_id_of(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Return the request id from the request, or else from the metadata (`x-request-id`), or else an empty string.

    Args:
        request: the request message.
        context: context of the call.
    """
    named = getattr(request, "request_id", "") or getattr(request, "ticket_id", "")
    if named:
        return str(named)
    for key, value in context.invocation_metadata() or ():
        if key == "x-request-id":
            return value.decode("ascii", "replace") if isinstance(value, bytes) else value
    return ""


async def _abort(
    error: BaseException, method: str, request: object, context: grpc.aio.ServicerContext[Any, Any]
) -> Never:
    """End the call with the status of `error`, and log it once. Always raises, as `ServicerContext.abort` does."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, NotImplementedError):  # a generated base class: the method is defined but not implemented
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not implemented")
    extra = {"request_id": request_id_of(request, context)[:MAX_REQUEST_ID_CHARS], "peer": context.peer()}
    if isinstance(error, KvferryError):
        # The end of a subscription is no failure: subscribers subscribe again.
        is_quiet = error.http_status < _QUIET_HTTP_STATUS or method.startswith(_LASTING_PREFIX)
        level = logging.INFO if is_quiet else logging.WARNING
        known = error
        _log.log(level, "%s: %s: %s", method, error.reason, error.message, extra=extra)
    else:
        _log.error("%s failed unexpectedly", method, exc_info=error, extra=extra)
        known = InvariantBroken(f"internal error in {method.rsplit('/', 1)[-1]}; the worker's log has the details")
    await context.abort(*status_of(known))
