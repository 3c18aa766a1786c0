"""Hostile clients, in a process of low priority: `python -m harness.siege.attacks HTTP GRPC NAME...`."""

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from kvferry.core.process.priority import lower_priority
from kvferry.v1 import common_pb2, inference_pb2, inference_pb2_grpc

_PAUSE_SECONDS = 0.5
"""Seconds between two requests of an attack, so that the attacks do not use up the machine's cores."""


@dataclass(frozen=True, slots=True)
class Target:
    """Addresses of the stack, `host:port`."""

    http: str
    grpc: str

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection to the HTTP server."""
        host, _, port = self.http.rpartition(":")
        return await asyncio.open_connection(host, int(port))


Attack = Callable[[Target], Coroutine[Any, Any, None]]


def _post(path: str, body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST " + path.encode() + b" HTTP/1.1", b"host: localhost", b"content-type: application/json", *headers]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body])


async def _send_and_leave(target: Target, data: bytes) -> None:
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        reader, writer = await target.connect()
        try:
            async with asyncio.timeout(60):
                writer.write(data)
                await writer.drain()
                await reader.read(1 << 16)
        finally:
            writer.close()


async def silent(target: Target) -> None:
    """Open 1,100 connections that send no byte; reopen each that is closed."""
    opened: set[asyncio.StreamWriter] = set()
    try:
        while True:
            for writer in [w for w in opened if w.is_closing()]:
                opened.discard(writer)
            with contextlib.suppress(OSError):
                while len(opened) < 1100:
                    opened.add((await target.connect())[1])
            await asyncio.sleep(_PAUSE_SECONDS)
    finally:
        for writer in opened:
            writer.close()


async def slow_heads(target: Target) -> None:
    """Send the head of a request at one byte per second."""
    while True:
        with contextlib.suppress(OSError):
            _, writer = await target.connect()
            for byte in b"GET /health HTTP/1.1\r\nhost: localhost":
                writer.write(bytes([byte]))
                await asyncio.sleep(1.0)
            writer.close()


async def header_floods(target: Target) -> None:
    """Send 64 MB of headers, then of trailers."""
    trailers = _post("/v1/completions", b"").replace(b"content-length: 0", b"transfer-encoding: chunked") + b"0\r\n"
    for start in itertools.cycle((b"GET / HTTP/1.1\r\n", trailers)):
        await _send_and_leave(target, start + b"x-flood: " + b"a" * (64 << 20))
        await asyncio.sleep(_PAUSE_SECONDS)


BODIES = (
    b'{"prompt": [' + b"1," * 3_000_000 + b"null]}",
    b'{"prompt": "' + b"1" * 8_000_000 + b'"}',
    b'{"prompt": [' + b'"",' * 1_000_000 + b"1]}",
    b'{"prompt": "x", "stop": [' + b'"a",' * 1_000_000 + b'"b"]}',
    b'{"prompt": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
    b"{" + b",".join(b'"k%d": 1' % i for i in range(300_000)) + b"}",
    b'{"prompt": "x", "repetition_penalty": 1e-310}',
    b'{"prompt": "x", "temperature": 5e-324, "seed": 1, "max_tokens": 4}',
    b'{"prompt": "x", "repetition_penalty": 0.01, "frequency_penalty": 2, "max_tokens": 16}',
    b'{"prompt": "x", "logit_bias": {"1": 100, "2": -100}, "temperature": 100, "max_tokens": 16}',
    b'{"prompt": "x", "min_tokens": 8, "max_tokens": 8, "top_p": 1e-310, "min_p": 1}',
    b"\x00\xff{",
)


async def bodies(target: Target) -> None:
    """Send hostile bodies one after another."""
    for body in itertools.cycle(BODIES):
        await _send_and_leave(target, _post("/v1/completions", body))
        await asyncio.sleep(_PAUSE_SECONDS)


async def messages(target: Target) -> None:
    """Send a conversation of 190,000 empty messages."""
    body = b'{"messages": [' + b'{"role": "user", "content": ""},' * 190_000 + b'{"role": "user", "content": "x"}]}'
    while True:
        await _send_and_leave(target, _post("/v1/chat/completions", body))
        await asyncio.sleep(_PAUSE_SECONDS)


async def unread_streams(target: Target) -> None:
    """Request long streams without reading the responses."""
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 64, "ignore_eos": True, "logprobs": 5}).encode()
    while True:
        writers = []
        with contextlib.suppress(OSError):
            for _ in range(2):
                reader, writer = await target.connect()
                writers.append(writer)
                reader._transport.pause_reading()  # type: ignore[attr-defined]
                writer.write(_post("/v1/completions", body))
            await asyncio.sleep(10.0)
        for writer in writers:
            writer.close()


async def early_leavers(target: Target) -> None:
    """Disconnect in the middle of the head, of the body, and of the answer."""
    whole = _post("/v1/completions", b'{"prompt": "x", "max_tokens": 32, "stream": true}')
    for cut in itertools.cycle((10, len(whole) - 5, len(whole))):
        with contextlib.suppress(OSError):
            _, writer = await target.connect()
            writer.write(whole[:cut])
            await writer.drain()
            writer.close()
        await asyncio.sleep(_PAUSE_SECONDS)


async def rpc_messages(target: Target) -> None:
    """Send large and invalid gRPC messages."""
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(target.grpc, options=options) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        requests = (
            inference_pb2.GenerateRequest(text="1" * (15 << 20)),
            inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage()] * 190_000)),
            inference_pb2.GenerateRequest(tokens=common_pb2.TokenIds(ids=[1] * 1_000_000)),
            inference_pb2.GenerateRequest(text="x", n=64_000),
        )
        for request in itertools.cycle(requests):
            with contextlib.suppress(grpc.RpcError):
                async for _ in stub.Generate(request, timeout=60):
                    pass
            await asyncio.sleep(_PAUSE_SECONDS)


ATTACKS: Mapping[str, Attack] = {
    "silent connections": silent,
    "slow heads": slow_heads,
    "header floods": header_floods,
    "bodies": bodies,
    "messages": messages,
    "unread streams": unread_streams,
    "early leavers": early_leavers,
    "gRPC messages": rpc_messages,
}


async def attack(target: Target, names: Sequence[str]) -> None:
    """Run attacks until one of them ends, which is an error."""
    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(ATTACKS[name](target), name=name)


if __name__ == "__main__":
    lower_priority(10)  # real attackers have machines of their own
    asyncio.run(attack(Target(*sys.argv[1:3]), sys.argv[3:]))
