"""Calls a gateway over HTTP: the models that it lists, and an answer as a stream of chunks. Each wait ends."""

import ssl
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from socket import SHUT_RDWR, socket

import msgspec
from msgspec import Struct

from kvferry.cli.chatting.safe_text import shown_line
from kvferry.cli.chatting.server_errors import refusal, stream_failure
from kvferry.cli.chatting.stream_events import DONE, ServerSentEvents, StreamedChunk, broken, parse_chunk
from kvferry.cli.server_url import ServerUrl
from kvferry.core.clock import Clock
from kvferry.core.errors import DeadlinePassed, KvferryError, Unavailable, UsageError

_CONNECT_SECONDS = 10.0
_LIST_SECONDS = 30.0
_MAX_BODY_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_OK = 200
_RETRIED = "unavailable"
"""Code of an error in a stream that another gateway can continue."""
_MAX_FAILURES = 10
"""Number of failures in a row after which a stream is not continued."""
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.05, 2.0


class _Final(Unavailable):
    """A stream failed in a way that another gateway does not change."""


class ListedModel(Struct):
    """A model that a server lists."""

    id: str


class ListedModels(Struct):
    """Answer of `/v1/models`."""

    data: list[ListedModel]


_MODELS = msgspec.json.Decoder(ListedModels)


class ChatClient:
    """Client of one server; each call has its own connection."""

    def __init__(self, url: ServerUrl, clock: Clock, *, api_key: str = "", timeout_seconds: float = 600.0) -> None:
        """
        Args:
            url: the server.
            clock: clock of the deadlines.
            api_key: API key; empty for none.
            timeout_seconds: time limit of an answer.

        Raises:
            UsageError: the key cannot be sent.
        """
        if not (api_key.isascii() and api_key.isprintable()) or " " in api_key:
            raise UsageError("the API key has other characters than printable ASCII; check its file", field="api_key")
        self.url = url
        self._clock = clock
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = timeout_seconds

    def first_model(self) -> str:
        """Return the first model that the server lists.

        Raises:
            KvferryError: the server does not answer, refuses the request, or lists no models.
        """
        with self._exchange("GET", "/v1/models", None, _LIST_SECONDS) as exchange:
            body = exchange.whole()
        try:
            models = _MODELS.decode(body).data
        except (msgspec.DecodeError, RecursionError):
            models = []
        if not models:
            raise Unavailable(f"{self.url} lists no models; set --url to a kvferry gateway, or --model")
        return models[0].id

    def answer(self, body: bytes) -> Generator[StreamedChunk, None, None]:
        """Send a chat request, JSON with `stream`, and yield its chunks. Closing the iterator closes the connection, at
        which the server cancels the request. An answer whose events have ids is continued after the loss of its
        gateway, by a request for the rest.

        Raises:
            KvferryError: the server does not answer in time, refuses the request, or the answer fails or is cut.
        """
        deadline = self._clock.monotonic() + self._timeout
        position, num_failures = "", 0
        while True:
            before = position
            seconds = deadline - self._clock.monotonic() if position else self._timeout
            try:
                for chunk, last_id in self._chunks(body, position, seconds):
                    position = last_id
                    yield chunk
                return
            except Unavailable as error:
                num_failures = num_failures + 1 if position == before else 1
                pause = min(_MAX_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2**num_failures)
                left = deadline - self._clock.monotonic()
                if not position or isinstance(error, _Final) or num_failures > _MAX_FAILURES or left <= pause:
                    raise
                threading.Event().wait(pause)

    def _chunks(self, body: bytes, position: str, seconds: float) -> Iterator[tuple[StreamedChunk, str]]:
        """Yield the chunks after the event with the id `position`, each with the id of its event."""
        headers = {"last-event-id": position} if position else {}
        with self._exchange("POST", "/v1/chat/completions", body, seconds, headers) as exchange:
            events = ServerSentEvents()
            for part in exchange.parts():
                for data in events.feed(part):
                    if data == DONE:
                        return
                    chunk = parse_chunk(data)
                    if chunk.error is not None:
                        failure = stream_failure(chunk.error, exchange.headers)
                        raise failure if chunk.error.code == _RETRIED else _Final(failure.message)
                    yield chunk, events.last_id
            raise broken("the server ended it before its last event")

    @contextmanager
    def _exchange(
        self, method: str, path: str, body: bytes | None, seconds: float, headers: Mapping[str, str] | None = None
    ) -> Iterator["_Exchange"]:
        kind = HTTPSConnection if self.url.is_tls else HTTPConnection
        with closing(kind(self.url.host, self.url.port, timeout=min(_CONNECT_SECONDS, seconds))) as connection:
            try:
                connection.connect()
                exchange = _Exchange(connection, self._clock, self._clock.monotonic() + seconds)
            except ssl.SSLError as error:
                why = shown_line(str(error))
                raise Unavailable(f"{self.url} cannot be reached by TLS ({why}); check the scheme of --url") from None
            except OSError as error:
                why = shown_line(error.strerror or str(error))
                raise Unavailable(f"{self.url} cannot be reached ({why}); start a gateway, or set --url") from None
            failure: KvferryError | None = None
            try:
                exchange.send(method, self.url.prefix + path, body, {**self._headers, **(headers or {})})
                if exchange.status != _OK:
                    raise refusal(exchange.status, exchange.whole(), exchange.headers, str(self.url))
                yield exchange
            except (OSError, HTTPException) as error:
                failure = broken(shown_line(str(error)) or type(error).__name__)
                if isinstance(error, TimeoutError) or exchange.is_late:
                    failure = DeadlinePassed(
                        f"{self.url} did not finish the answer within {seconds:g} s; use a longer --timeout"
                    )
            finally:
                exchange.end()
            # Raised here, since the traceback of the library's error would keep the socket open.
            if failure is not None:
                raise failure


class _Exchange:
    """One request and its answer, on a connection of their own."""

    def __init__(self, connection: HTTPConnection, clock: Clock, deadline: float) -> None:
        assert isinstance(connection.sock, socket)
        self._connection, self._clock, self._deadline = connection, clock, deadline
        self._socket = connection.sock  # the connection lets go of it when the answer ends with its closing
        self._response: HTTPResponse | None = None
        # The library reads as many lines before an answer as a server sends, each within the time limit of a read.
        self._watchdog = threading.Timer(max(0.0, deadline - clock.monotonic()), self._cut)
        self._watchdog.daemon = True
        self._watchdog.start()

    @property
    def is_late(self) -> bool:
        """Whether the time for the answer is over."""
        return self._clock.monotonic() >= self._deadline

    def send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> None:
        """Send the request and receive the head of its answer."""
        given = {"accept": "text/event-stream, application/json", **headers}
        if body is not None:
            given["content-type"] = "application/json"
        self._wait()
        self._connection.request(method, path, body, given)
        self._wait()
        self._response = self._connection.getresponse()

    @property
    def response(self) -> HTTPResponse:
        """The answer, whose head was received."""
        assert self._response is not None
        return self._response

    @property
    def status(self) -> int:
        """HTTP status of the response."""
        return self.response.status

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the answer, by their names in lower case."""
        return {name.lower(): value for name, value in self.response.headers.items()}

    def parts(self) -> Iterator[bytes]:
        """Yield the body as it arrives."""
        while True:
            self._wait()
            part = self.response.read1(_READ_BYTES)
            if not part:
                return
            yield part

    def whole(self) -> bytes:
        """Return the body, at most 1 MiB of it."""
        body = b""
        for part in self.parts():
            body += part
            if len(body) > _MAX_BODY_BYTES:
                break
        return body

    def end(self) -> None:
        """Close the connection, also in the middle of an answer."""
        self._watchdog.cancel()
        self._cut()
        if self._response is not None:
            self._response.close()

    def _cut(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(SHUT_RDWR)

    def _wait(self) -> None:
        remaining = self._deadline - self._clock.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self._socket.settimeout(remaining)
