"""Server interceptor that admits only authenticated callers whose role may call the method."""

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Never

import grpc

from kvferry.core.errors import Forbidden, KvferryError
from kvferry.rpc.access.call_keys import CALLER_METADATA, CallVerifier
from kvferry.rpc.access.table import may_call
from kvferry.rpc.errors import status_of

_log = logging.getLogger(__name__)
_OWN_PREFIX = "/kvferry."


class CallGuard(grpc.aio.ServerInterceptor):
    """Rejects calls of kvferry's services before their messages are parsed; health and reflection are open."""

    def __init__(self, verifier: CallVerifier) -> None:
        """
        Args:
            verifier: checks the tokens of the calls.
        """
        self._verifier = verifier

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        if not method.startswith(_OWN_PREFIX):
            return await continuation(handler_call_details)
        try:
            role = self._verifier.verify(method, token_of(handler_call_details.invocation_metadata))
            if not may_call(role, method):
                raise Forbidden(f"a process of role {role} may not call {method}", reason="CALLER_ROLE")
        except KvferryError as error:
            return _rejection(await continuation(handler_call_details), method, error)
        return await continuation(handler_call_details)


def token_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the token in a call's metadata; empty if there is none, or more than one."""
    found = [value for key, value in metadata or () if key == CALLER_METADATA]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else ""


def _rejection(handler: Any, method: str, error: KvferryError) -> Any:
    """Return a handler that ends the call with `error` before its messages are received."""
    if handler is None:  # the server has no such method
        return None

    async def reject(_request: object, context: grpc.aio.ServicerContext[Any, Any]) -> Never:
        _log.info("%s: %s: %s", method, error.reason, error.message, extra={"peer": context.peer()})
        await context.abort(*status_of(error))

    # A streaming handler for every method: it answers before the request message has arrived. Otherwise a caller could
    # occupy memory by sending all but the last bytes of a message.
    return grpc.stream_stream_rpc_method_handler(reject)
