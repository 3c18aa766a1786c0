"""Channels whose calls carry the token of the calling process."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import grpc

from kvferry.rpc.access.call_keys import CallSigner


class _SignedChannel:
    """A channel for generated stubs only: it adds the token when a stub creates its methods, so that a call costs
    nothing more than the metadata."""

    def __init__(self, channel: grpc.Channel | grpc.aio.Channel, signer: CallSigner, address: str) -> None:
        self._channel = channel
        self._signer = signer
        self._address = address

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Callable[..., Any]:
        return self._signed(method, self._channel.unary_unary(method, *args, **options))

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Callable[..., Any]:
        return self._signed(method, self._channel.unary_stream(method, *args, **options))

    def _signed(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        token = self._signer.metadata(method, self._address)
        plain = partial(call, metadata=token)

        def signed_call(*args: Any, metadata: Sequence[tuple[str, str]] | None = None, **options: Any) -> Any:
            if metadata is None:
                return plain(*args, **options)
            return call(*args, metadata=(*token, *metadata), **options)

        return signed_call


def signed(channel: grpc.aio.Channel, signer: CallSigner, address: str) -> grpc.aio.Channel:
    """Return `channel` for use by a generated stub, with the token of `signer` in every call.

    Args:
        channel: an open channel; the caller closes it.
        signer: makes the tokens, with this process's role and key.
        address: `host:port` that the channel dials.
    """
    return cast("grpc.aio.Channel", _SignedChannel(channel, signer, address))


def signed_blocking(channel: grpc.Channel, signer: CallSigner, address: str) -> grpc.Channel:
    """Like `signed`, for a blocking channel.

    Args:
        channel: the channel to the server.
        signer: signs the calls.
        address: address of the server, `host:port`.
    """
    return cast("grpc.Channel", _SignedChannel(channel, signer, address))
