"""Sockets of the HTTP server: delays on kept connections, and invalid addresses."""

import asyncio
import socket
import statistics

import pytest
from harness.fakes.scripted_gateway import scripted_gateway

from kvferry.core.clock import SystemClock
from kvferry.core.errors import UsageError
from kvferry.gateway.http.server.http_server import HttpServer

_ROUNDS = 60
_MAX_SECONDS = 0.002
"""Nagle's algorithm with delayed acknowledgements adds 40 ms to an answer, which takes 0.1 ms without it."""
_TRIES = 3


def median_seconds(address: str) -> float:
    """Return the median duration in seconds of `/health` on one kept connection."""
    host, _, port = address.rpartition(":")
    request = f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    clock, seconds = SystemClock(), []
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        for _ in range(_ROUNDS):
            begun = clock.monotonic()
            connection.sendall(request)
            answer = b""
            while not answer.endswith(b'{"status":"alive"}'):
                answer += connection.recv(4096)
            seconds.append(clock.monotonic() - begun)
    return statistics.median(seconds)


async def test_answers_on_a_kept_connection_are_not_delayed() -> None:
    async with scripted_gateway() as gateway:
        address = gateway.gateway.listening.http
        assert min([await asyncio.to_thread(median_seconds, address) for _ in range(_TRIES)]) < _MAX_SECONDS


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:99999", "127.0.0.1:x", ":8000"])
async def test_an_invalid_address_is_refused_with_its_setting(address: str) -> None:
    with pytest.raises(UsageError) as refused:
        await HttpServer.start(lambda *_: None, address, field="admin", drain_seconds=1.0)  # type: ignore[arg-type]
    assert refused.value.field == "admin"
