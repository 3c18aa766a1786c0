"""Targets: the HTTP and gRPC ports of `kvferry up`, with a canary request after each batch of inputs."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import grpc
import httpx
import psutil
from google.protobuf import message_factory

from harness.fuzz.mutation import bytes_at_random, json_at_random, message_at_random
from harness.fuzz.target import MAX_MEMORY_BYTES, MAX_SECONDS, Run, Target
from harness.servers.processes import RunningProcess, running
from harness.servers.worker_channel import signer_of
from kvferry.rpc.access.table import ALLOWED
from kvferry.v1 import (
    decode_pb2,
    inference_pb2,
    kv_events_pb2,
    kv_transfer_pb2,
    prefill_pb2,
    worker_admin_pb2,
)

Metadata = tuple[tuple[str, str], ...]
_SIGNED = 224
"""Inputs whose second byte has at least this value make calls without a token."""
_CANARY_EVERY = 25
_CANARY_SECONDS = 20.0
_FILES = (inference_pb2, prefill_pb2, decode_pb2, kv_transfer_pb2, kv_events_pb2, worker_admin_pb2)
METHODS = [
    method for file in _FILES for service in file.DESCRIPTOR.services_by_name.values() for method in service.methods
]
_STREAM_SECONDS = 0.3
"""Seconds for which an endless stream is read."""
_ANSWER_SECONDS = 0.3
"""Seconds without a byte after which an answer counts as complete, or as not begun because the gateway waits for more
input.
"""


class Stack:
    """`kvferry up` with the tiny model."""

    def __init__(self, process: RunningProcess) -> None:
        ready = process.wait_for("ready")
        self.http, self.grpc = str(ready["http"]), str(ready["grpc"])
        family = psutil.Process(process.process.pid)
        self._children = {child.pid: child for child in family.children(recursive=True)}
        self._family = family
        self._before = self._memory()
        self.ports = sorted(
            {c.laddr.port for child in family.children() for c in child.net_connections() if c.status == "LISTEN"}
            - {int(self.http.rpartition(":")[2])}
        )
        """Ports of the gateway and the workers, including those for administration."""
        self._runs = 0

    def _memory(self) -> int:
        return sum(child.memory_info().rss for child in self._family.children())

    def check(self) -> None:
        """Call `canary` once per `_CANARY_EVERY` calls."""
        self._runs += 1
        if self._runs % _CANARY_EVERY == 0:
            self.canary()

    def canary(self) -> None:
        """Check that a small request is answered, that no worker has exited, and that the memory stays below
        the limit.
        """
        body = {"prompt": "The ferry", "max_tokens": 4}
        answer = httpx.post(f"http://{self.http}/v1/completions", json=body, timeout=_CANARY_SECONDS)
        assert answer.status_code == 200, f"the canary request got {answer.status_code}: {answer.text[:300]}"
        exited = [pid for pid in self._children if not psutil.pid_exists(pid)]
        assert not exited, f"processes exited: {exited}"
        used = self._memory() - self._before
        assert used < MAX_MEMORY_BYTES, f"the stack took {used >> 20} MiB"


@contextmanager
def _stack() -> Iterator[Stack]:
    # The KV memory is small, because its pages count as memory once they are used.
    flags = (
        "--model",
        "tiny",
        "--threads",
        "1",
        "--kv-memory",
        "16MiB",
        "--http",
        "127.0.0.1:0",
        "--grpc",
        "127.0.0.1:0",
        "--json",
    )
    with running("up", *flags) as process:
        stack = Stack(process)
        yield stack
        stack.canary()


# ---------------------------------------------------------------------- HTTP: the bytes of a connection


def _request(path: str, body: object, *headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + content


def _http_seeds() -> list[bytes]:
    sampling = {"max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x"], "n": 1, "logprobs": None}
    user = {"role": "user", "content": "Hello"}
    parts = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "2"}
    return [
        _request("/v1/chat/completions", {"messages": [user, called, result], "tools": tools, "max_tokens": 2}),
        _request("/v1/chat/completions", {"messages": [user], "tools": tools, "tool_choice": "required", **sampling}),
        _request("/v1/completions", {"prompt": "Hello", **sampling, "logit_bias": {"5": 1.0}}),
        _request("/v1/completions", {"prompt": [[1, 2], [3]], **sampling, "stream": True, "echo": False}),
        _request("/v1/chat/completions", {"messages": [user, parts], **sampling, "stream": True, "user": "u"}),
        _request(
            "/v1/chat/completions", {"messages": [user], "max_completion_tokens": 2, "tools": [], "logprobs": True}
        ),
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\nX-Request-Id: abc\r\n\r\n",
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"1\r\n{\r\n0\r\na: b\r\n\r\n"
        ),
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\nGET /v1/models HTTP/1.0\r\n\r\n",
    ]


_HTTP_WORDS = [
    *(
        b"\r\n",
        b"\r\n\r\n",
        b"GET ",
        b"POST ",
        b"HEAD ",
        b"OPTIONS ",
        b"/v1/completions",
        b"/v1/chat/completions",
        b"/../",
    ),
    *(
        b"Transfer-Encoding: chunked\r\n",
        b"Content-Length: 0\r\n",
        b"Content-Length: -1\r\n",
        b"Expect: 100-continue\r\n",
    ),
    *(
        b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
        b"Content-Encoding: gzip\r\n",
        b"HTTP/2.0",
        b"ffffffffffffffff\r\n",
    ),
    *(
        b"X-Request-Id: \x00\r\n",
        b"Authorization: Bearer \xff\r\n",
        b"Host: \r\n",
        b"a" * 9000,
        b"x: y\r\n" * 200,
        b"%00",
    ),
]


def _http_mutate(data: bytes, random: Random) -> bytes:
    """Change the body as JSON, with a length that agrees, or the bytes of head and body."""
    head, empty, body = data.partition(b"\r\n\r\n")
    if body[:1] != b"{" or random.random() < 0.35:
        return bytes_at_random(data, random, _HTTP_WORDS)
    body = json_at_random(body, random, ("user", "system", "json_object", "auto"))
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body)]) + empty + body


@contextmanager
def _http() -> Iterator[Run]:
    with _stack() as stack:
        host, _, port = stack.http.rpartition(":")

        def run(data: bytes) -> None:
            with socket.create_connection((host, int(port)), MAX_SECONDS) as link:
                answer = b""
                try:
                    link.sendall(data)
                    # The client's end of input is not sent, because the gateway would take it for a disconnect.
                    link.settimeout(_ANSWER_SECONDS)
                    while len(answer) < 1 << 20 and (more := link.recv(65536)):
                        answer += more
                except (ConnectionError, TimeoutError):  # refused during the request, or incomplete
                    pass
            assert not answer or answer.startswith(b"HTTP/1.1 "), f"not HTTP: {answer[:100]!r}"
            assert answer[9:12] not in (b"500", b"502"), f"answered {answer[:600]!r}"
            stack.check()

        yield run


# ---------------------------------------------------------------------- gRPC: [ method u8 ][ port u8 ][ message ]


def _grpc_seeds() -> list[bytes]:
    text = inference_pb2.GenerateRequest(text="Hello")
    text.sampling.max_tokens = 2
    chat = inference_pb2.TokenizeRequest()
    chat.chat.messages.add(role="user", content="Hello")
    given = {"Generate": text, "Tokenize": chat}
    seeds = []
    for number, method in enumerate(METHODS):
        message = given[method.name] if method.name in given else _new(method)
        seeds.append(bytes([number, 0]) + message.SerializeToString())
    return seeds


def _new(method: Any) -> Any:
    return message_factory.GetMessageClass(method.input_type)()


def _grpc_mutate(data: bytes, random: Random) -> bytes:
    """Change fields of the message, or its bytes; select a random port."""
    number, payload = data[0] % len(METHODS), data[2:]
    if random.random() < 0.3:
        number = random.randrange(len(METHODS))
    message = _new(METHODS[number])
    try:
        message.ParseFromString(payload)
    except Exception:
        message.Clear()
    for _ in range(random.choice((1, 2, 4))):
        message_at_random(message, random)
    made: bytes = message.SerializeToString()
    if random.random() < 0.2:
        made = bytes_at_random(made, random)
    return bytes([number, random.randrange(256)]) + made


@contextmanager
def _grpc() -> Iterator[Run]:
    with _stack() as stack:
        channels = [grpc.insecure_channel(f"127.0.0.1:{port}") for port in stack.ports]

        def run(data: bytes) -> None:
            if len(data) < 2:
                return
            method = METHODS[data[0] % len(METHODS)]
            path = f"/{method.containing_service.full_name}/{method.name}"
            payload = _harmless(method, data[2:])
            number, signed = data[1] % len(channels), data[1] < _SIGNED
            metadata = _signed(path, f"127.0.0.1:{stack.ports[number]}") if signed else ()
            call = _open(channels[number], path, method.server_streaming, metadata)
            try:
                call(payload)
            except grpc.RpcError as error:
                code, detail = error.code(), error.details() or ""
                unread = code is grpc.StatusCode.INTERNAL and "deserializing" in detail
                documented = code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS)
                assert documented or unread, f"{path} on {stack.ports}: {code} {detail[:300]}"
            stack.check()

        try:
            yield run
        finally:
            for channel in channels:
                channel.close()


def _harmless(method: Any, payload: bytes) -> bytes:
    """Return a message that does not stop or pause the worker, as valid messages do."""
    if method.name == "Drain":
        return b"\xff" + payload  # not a message
    if method.name == "SetPause":
        return payload + bytes(
            [method.input_type.fields_by_name["mode"].number << 3, 0]
        )  # resumes: the last value counts
    return payload


def _signed(path: str, address: str) -> Metadata:
    """Return the token of a process that may call the method."""
    return signer_of(min(ALLOWED[path])).metadata(path, address) if path in ALLOWED else ()


def _open(channel: grpc.Channel, path: str, streams: bool, metadata: Metadata) -> Callable[[bytes], object]:
    """Return a function that calls a method with the bytes of a message, and reads some of its answer."""
    if not streams:
        return partial(channel.unary_unary(path), timeout=MAX_SECONDS, metadata=metadata)

    def read(payload: bytes) -> None:
        method: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(path)
        answers = method(payload, timeout=_STREAM_SECONDS, metadata=metadata)
        try:
            for _, _ in zip(range(50), answers, strict=False):
                pass
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        finally:
            answers.cancel()

    return read


TARGETS = (
    Target("http", _http_seeds, _http, _http_mutate, is_server=True),
    Target("grpc", _grpc_seeds, _grpc, _grpc_mutate, is_server=True),
)
