"""Channels to workers of tests, whose calls are signed with the test's ticket key."""

from collections.abc import Callable
from typing import Any, NamedTuple

import grpc

from kvferry.rpc.access.call_keys import CallSigner, role_key
from kvferry.rpc.access.table import ALLOWED, CallerRole
from kvferry.rpc.channel import open_blocking_channel
from kvferry.rpc.tls.pool_tls import PoolTls

TEST_KEYS = {
    "KVFERRY_TICKET_KEY": "t" * 32,
    "KVFERRY_TENANT_KEY": "n" * 32,
    "KVFERRY_GATEWAY_KEY": role_key(b"t" * 32, CallerRole.GATEWAY).hex(),
}
"""Environment of every process of a test."""


def signer_of(role: CallerRole) -> CallSigner:
    """Return the signer of a process of `role`."""
    return CallSigner(role, role_key(TEST_KEYS["KVFERRY_TICKET_KEY"].encode(), role))


class _Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class _Signing(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Signs each call in a role that may call its method."""

    def __init__(self, address: str) -> None:
        self._address = address

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(self._signed(details), request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(self._signed(details), request)

    def _signed(self, details: Any) -> _Details:
        metadata = list(details.metadata or ())
        for role in sorted(ALLOWED.get(details.method, ()))[:1]:
            metadata += signer_of(role).metadata(details.method, self._address)
        return _Details(
            details.method,
            details.timeout,
            metadata,
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )


def worker_channel(address: str, tls: PoolTls | None = None) -> grpc.Channel:
    """Open a blocking channel to a worker of a test; a context manager, like every channel.

    Args:
        tls: TLS of the test's pool; `None` for a plain connection.
    """
    return grpc.intercept_channel(open_blocking_channel(address, tls), _Signing(address))
