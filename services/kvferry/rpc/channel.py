"""Client channels with keepalive, fast reconnection and a message size limit."""

from typing import TYPE_CHECKING

import grpc

from kvferry.core.limits import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from kvferry.rpc.tls.pool_tls import PoolTls  # clients of other services load no code of pools

MAX_CLIENT_MESSAGE_BYTES = 4 << 20
"""Message size limit for client requests; prompts are shorter, and larger messages take long to parse."""

KEEPALIVE_SECONDS = 10
"""Seconds without traffic, while calls are in flight, after which a keepalive ping is sent; the peer must answer within
half that time."""

Options = tuple[tuple[str, int], ...]

PING_OPTIONS: Options = (
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_SECONDS * 500),
    # gRPC also sends pings to estimate bandwidth, and sends no keepalive ping while such a ping is unanswered. Its
    # default timeout of a minute would delay the detection of a peer that hangs during a stream.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_SECONDS * 500),
    # A call may be idle for long (a queued prompt); keepalive pings must continue.
    ("grpc.http2.max_pings_without_data", 0),
)
"""Keepalive options of clients and servers."""

_CHANNEL_OPTIONS: Options = (
    *PING_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A worker restarts within seconds; the default backoff of up to two minutes is too long.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Connect directly, even if the environment specifies a proxy.
    ("grpc.enable_http_proxy", 0),
    # Each channel has its own connections and backoff.
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(
    address: str, tls: "PoolTls | None" = None, *, credentials: grpc.ChannelCredentials | None = None
) -> grpc.aio.Channel:
    """Create an asyncio channel, which connects on the first call. The caller must close it.

    Args:
        address: `host:port` of the server.
        tls: TLS to a worker of the pool, with the current certificate; `None` for other connections.
        credentials: TLS to a server that is verified by its address; `None` for a plain connection.
    """
    secured, options = _secured(tls, credentials)
    if secured is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, secured, options=options)


def open_blocking_channel(
    address: str, tls: "PoolTls | None" = None, *, credentials: grpc.ChannelCredentials | None = None
) -> grpc.Channel:
    """Like `open_channel`, for a blocking channel."""
    secured, options = _secured(tls, credentials)
    if secured is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, secured, options=options)


def _secured(
    tls: "PoolTls | None", credentials: grpc.ChannelCredentials | None
) -> tuple[grpc.ChannelCredentials | None, tuple[tuple[str, int | str], ...]]:
    """Return the credentials of a channel, `None` for a plain one, and its options."""
    if tls is None:
        return credentials, _CHANNEL_OPTIONS
    return tls.channel_credentials(), (*_CHANNEL_OPTIONS, *tls.channel_options)
