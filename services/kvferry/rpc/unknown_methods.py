"""A gRPC server that answers calls of unknown methods without decoding the methods' names.

gRPC's asyncio server (grpcio 1.85) decodes the name of each method that is not registered as UTF-8, in its main loop.
One call with another name, before any authentication, ends the server: it accepts no calls until its last stream has
ended, and frees requests for calls to which the core still refers. Here all methods are registered, so the loop
receives registered calls only.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server

from kvferry.rpc.channel import Options

_UNKNOWN = "the method does not exist; see proto/kvferry/v1"


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """The server below `grpc.aio.Server`, whose loop receives the calls of registered methods only."""

    def _make_request_call_future(self, method: bytes | None) -> "asyncio.Future[Any]":
        """Return the next call of a method; `None` stands for all methods that are not registered."""
        if method is None:
            return asyncio.get_running_loop().create_task(self._reject_unknown())
        call: asyncio.Future[Any] = super()._make_request_call_future(method)
        return call

    async def _reject_unknown(self) -> None:
        """Reject calls of unknown methods, until the server stops."""
        rejecting: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        while True:
            call = await self._request_call()
            task = loop.create_task(_reject(cygrpc._ServicerContext(call, None, None, loop)))
            rejecting.add(task)
            task.add_done_callback(rejecting.discard)


async def _reject(context: Any) -> None:
    try:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, _UNKNOWN)
    except grpc.aio.AbortError:
        pass  # `abort` raises this after sending the status
    except cygrpc.ExecuteBatchError:
        pass  # the caller has disconnected


class _Server(_server.Server):
    """A `grpc.aio.Server` on top of `_Core`."""

    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Options) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _Core(self._loop, None, (), interceptors, tuple(options), None)


def registered_methods_server(interceptors: Sequence[grpc.aio.ServerInterceptor], options: Options) -> grpc.aio.Server:
    """Create a server for services whose methods are registered, as the functions of generated code do.

    Args:
        interceptors: interceptors of all calls, outermost first.
        options: channel options of gRPC.
    """
    return cast("grpc.aio.Server", _Server(interceptors, options))
