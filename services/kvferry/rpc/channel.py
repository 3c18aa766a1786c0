"""Client channels: dead peers are noticed, restarted peers are found again quickly, sizes are bounded."""

import grpc

MAX_MESSAGE_BYTES = 16 << 20
"""A million token ids take at most 5 MiB; nothing larger belongs on the control plane."""

KEEPALIVE_SECONDS = 10
"""Silence on a connection with calls after which the peer is asked whether it lives; it has half of it to answer."""

Options = tuple[tuple[str, int], ...]

PING_OPTIONS: Options = (
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_SECONDS * 500),
    # A ping also goes out with data, to estimate bandwidth, and while it is unanswered keepalive sends none of its
    # own. By default it may stay so for a minute, in which a peer that froze in mid-stream is not noticed.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_SECONDS * 500),
    # A call may be silent for long (a prompt in a queue); pings go on all the same.
    ("grpc.http2.max_pings_without_data", 0),
)
"""The same for both ends of a connection."""

_CHANNEL_OPTIONS: Options = (
    *PING_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A worker that restarts is back in a second; the default backoff of up to two minutes would lose it.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Peers are reached directly, whatever proxy the environment names.
    ("grpc.enable_http_proxy", 0),
    # Channels do not share connections or their backoff, so that one worker's past is not another's.
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to `host:port`; connects on the first call. The caller closes it."""
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


def open_blocking_channel(address: str) -> grpc.Channel:
    """The same for callers without an event loop."""
    return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
