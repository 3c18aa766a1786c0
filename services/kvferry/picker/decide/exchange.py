"""The exchange of one HTTP request between a proxy and the picker: messages in, messages out. No I/O.

The proxy sends the request's headers and, by its mode, its body. When the body is complete, or its first part if it is
larger than the limit, the exchange asks for a decision. What the proxy gets then depends on the mode:

    mode            decision after      the route is in       body
    none, streamed  the headers         the header response   not needed
    buffered        the body            the body response     unchanged
    full duplex     the body            the header response   sent back in parts, since the proxy keeps none of it

In full duplex mode the proxy waits for nothing, so the header response is held until the decision; in the other modes
it sends the body only after the header response.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum

from kvferry.core.errors import InvalidRequest
from kvferry.core.states import Machine

PART_BYTES = 62_000
"""Maximum size of a part that is sent back; Envoy accepts 64 KiB."""


class BodyMode(IntEnum):
    """How the proxy sends a body; the numbers of Envoy's `ProcessingMode.BodySendMode`."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX = 4
    GRPC = 5


DUPLEX = frozenset({BodyMode.FULL_DUPLEX, BodyMode.GRPC})
_BUFFERED = frozenset({BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL})


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The headers of the request, the first message."""

    headers: Mapping[str, str]
    """By lower-case name, also `:path` and `:method`."""
    is_end: bool
    """Whether the request has neither body nor trailers."""
    request_mode: BodyMode = BodyMode.FULL_DUPLEX
    response_mode: BodyMode = BodyMode.NONE
    subset: tuple[str, ...] | None = None
    """Endpoints of which one must be chosen; `None` for all."""


@dataclass(frozen=True, slots=True)
class RequestPart:
    """A part of the request's body."""

    data: bytes
    is_end: bool


@dataclass(frozen=True, slots=True)
class RequestTrailers:
    """The trailers of the request, which end its body."""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The headers of the response."""

    status: int
    """HTTP status; 0 if the proxy sent none."""
    served: str
    """Endpoint that served the request; empty if the proxy does not report it."""
    is_end: bool


@dataclass(frozen=True, slots=True)
class ResponsePart:
    """A part of the response's body."""

    data: bytes
    is_end: bool


@dataclass(frozen=True, slots=True)
class ResponseTrailers:
    """The trailers of the response, which end its body."""


Incoming = RequestHead | RequestPart | RequestTrailers | ResponseHead | ResponsePart | ResponseTrailers


class MessageKind(Enum):
    """The message of the proxy that a reply answers."""

    REQUEST_HEAD = "request_headers"
    REQUEST_BODY = "request_body"
    REQUEST_TRAILERS = "request_trailers"
    RESPONSE_HEAD = "response_headers"
    RESPONSE_BODY = "response_body"
    RESPONSE_TRAILERS = "response_trailers"


@dataclass(frozen=True, slots=True)
class PickedRoute:
    """A decision for an endpoint."""

    endpoints: tuple[str, ...]
    """The chosen endpoint, then fallbacks in order."""
    prefill: str = ""
    """Endpoint that computes the prompt; empty if the chosen one does."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A decision not to serve the request."""

    status: int
    message: str
    reason: str
    """Label of the metric, and Envoy's response code detail."""
    retry_after_seconds: float | None = None


Verdict = PickedRoute | Refusal


@dataclass(frozen=True, slots=True)
class Ask:
    """A decision is needed: call `Exchange.decided`."""

    body: bytes | None
    """The body; `None` if the request has none or the proxy does not send it."""
    is_cut: bool = False
    """Whether the body continues beyond `body`."""


@dataclass(frozen=True, slots=True)
class ProxyReply:
    """A response to the proxy."""

    part: MessageKind
    route: PickedRoute | None = None
    """The route, which becomes headers and metadata; `None` for no change."""
    echo: bytes | None = None
    """Part of the body that is sent back; `None` leaves the proxy's body as it is."""
    is_end: bool = False
    """Whether `echo` is the body's last part."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The response of the picker to the client, in place of a model server's."""

    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Answered:
    """The response began: the prompt has been computed."""

    status: int
    served: str


@dataclass(frozen=True, slots=True)
class Complete:
    """The response has ended."""


Outgoing = Ask | ProxyReply | Refuse | Answered | Complete


class ExchangeState(StrEnum):
    """Progress of an exchange; transitions are in `EXCHANGE_MACHINE`."""

    NEW = "new"
    READING = "reading"
    """The body is read."""
    ASKED = "asked"
    """The decision is awaited."""
    ROUTED = "routed"
    """The proxy has the route."""
    ANSWERING = "answering"
    """The response has begun."""
    DONE = "done"


class ExchangeEvent(StrEnum):
    """Event that changes the state of an exchange; transitions are in `EXCHANGE_MACHINE`."""

    READ = "read"
    ASK = "ask"
    ROUTE = "route"
    REFUSE = "refuse"
    ANSWER = "answer"
    COMPLETE = "complete"
    CLOSE = "close"


_S, _E = ExchangeState, ExchangeEvent
EXCHANGE_MACHINE: Machine[ExchangeState, ExchangeEvent] = Machine(
    name="picker exchange",
    initial=_S.NEW,
    final=frozenset({_S.DONE}),
    table={
        (_S.NEW, _E.READ): _S.READING,
        (_S.NEW, _E.ASK): _S.ASKED,
        (_S.READING, _E.ASK): _S.ASKED,
        (_S.ASKED, _E.ROUTE): _S.ROUTED,
        (_S.ASKED, _E.REFUSE): _S.DONE,
        (_S.ROUTED, _E.ANSWER): _S.ANSWERING,
        (_S.ANSWERING, _E.ANSWER): _S.ANSWERING,  # 1xx, and the headers of a retry
        (_S.ANSWERING, _E.COMPLETE): _S.DONE,
        (_S.ROUTED, _E.COMPLETE): _S.DONE,
        # The stream of the proxy may end at any time.
        (_S.NEW, _E.CLOSE): _S.DONE,
        (_S.READING, _E.CLOSE): _S.DONE,
        (_S.ASKED, _E.CLOSE): _S.DONE,
        (_S.ROUTED, _E.CLOSE): _S.DONE,
        (_S.ANSWERING, _E.CLOSE): _S.DONE,
    },
)


class Exchange:
    """One request. Feed it messages with `on` and decisions with `decided`; it returns what to send and to do."""

    def __init__(self, max_body_bytes: int) -> None:
        """
        Args:
            max_body_bytes: part of a body that is read before the decision, in bytes.
        """
        self.max_bytes = max_body_bytes
        """Part of a body that is read before the decision; may be lowered while it is read."""
        self._mode = self._response_mode = BodyMode.NONE
        self._held: list[RequestPart] = []
        self.num_bytes = 0
        """Bytes of the body that are held."""
        self._pending = MessageKind.REQUEST_HEAD
        self._has_trailers = False
        self.state: ExchangeState = EXCHANGE_MACHINE.initial

    def on(self, message: Incoming) -> list[Outgoing]:
        """Handle a message of the proxy.

        Raises:
            InvalidRequest: the proxy may not send this message now.
        """
        match message:
            case RequestHead():
                return self._head(message)
            case RequestPart():
                return self._body(message)
            case RequestTrailers():
                return self._trailers()
            case ResponseHead():
                return self._answer(message)
            case ResponsePart():
                return self._answer_part(message)
            case ResponseTrailers():
                return [ProxyReply(MessageKind.RESPONSE_TRAILERS), *self._complete()]

    def decided(self, verdict: Verdict) -> list[Outgoing]:
        """Return the messages to the proxy after the decision that was asked for."""
        if isinstance(verdict, Refusal):
            self._step(_E.REFUSE)
            self._drop()
            return [Refuse(verdict)]
        self._step(_E.ROUTE)
        return [ProxyReply(self._pending, verdict), *self._echoes()]

    def closed(self) -> bool:
        """Note that the stream has ended; return whether it ended before the response."""
        if self.state is _S.DONE:
            return False
        self._step(_E.CLOSE)
        self._drop()
        return True

    # -- the request -------------------------------------------------------------------------------------------------

    def _head(self, head: RequestHead) -> list[Outgoing]:
        if self.state is not _S.NEW:
            raise _unexpected("request headers", self.state)
        self._mode, self._response_mode = head.request_mode, head.response_mode
        if head.is_end or self._mode in (BodyMode.NONE, BodyMode.STREAMED, BodyMode.GRPC):
            self._step(_E.ASK)
            return [Ask(None)]
        self._step(_E.READ)
        if self._mode in DUPLEX:
            return []
        self._pending = MessageKind.REQUEST_BODY
        return [ProxyReply(MessageKind.REQUEST_HEAD)]

    def _body(self, part: RequestPart) -> list[Outgoing]:
        if self.state is _S.NEW:
            raise _unexpected("a request body", self.state)
        if self.state is _S.ASKED:  # full duplex mode: the body goes on while the decision is awaited
            self._held.append(part)
            return []
        if self.state is not _S.READING:
            return list(_echo(part)) if self._mode in DUPLEX else [ProxyReply(MessageKind.REQUEST_BODY)]
        self._held.append(part)
        self.num_bytes += len(part.data)
        is_whole = part.is_end or self._mode is BodyMode.BUFFERED
        if not is_whole and self.num_bytes < self.max_bytes and self._mode is not BodyMode.BUFFERED_PARTIAL:
            return []
        return self._ask(is_whole=is_whole)

    def _trailers(self) -> list[Outgoing]:
        if self.state is _S.NEW:
            raise _unexpected("request trailers", self.state)
        if self.state in (_S.READING, _S.ASKED):
            self._has_trailers = True
            return self._ask(is_whole=True) if self.state is _S.READING else []
        return [ProxyReply(MessageKind.REQUEST_TRAILERS)]

    def _ask(self, *, is_whole: bool) -> list[Outgoing]:
        self._step(_E.ASK)
        body = b"".join(part.data for part in self._held)
        is_cut = not is_whole or len(body) > self.max_bytes
        if self._mode in _BUFFERED:
            self._drop()
        return [Ask(body[: self.max_bytes], is_cut)]

    def _drop(self) -> None:
        self._held.clear()
        self.num_bytes = 0

    def _echoes(self) -> Iterator[Outgoing]:
        """Yield what the proxy has sent since the headers, in full duplex mode, and what it still waits for."""
        held, self._held = self._held, []
        self.num_bytes = 0
        if self._mode in DUPLEX:
            for part in held:
                yield from _echo(part)
        elif self._pending is MessageKind.REQUEST_HEAD:
            yield from (ProxyReply(MessageKind.REQUEST_BODY) for _ in held)
        if self._has_trailers:
            yield ProxyReply(MessageKind.REQUEST_TRAILERS)

    # -- the response ------------------------------------------------------------------------------------------------

    def _answer(self, head: ResponseHead) -> list[Outgoing]:
        if self.state not in (_S.ROUTED, _S.ANSWERING):
            # The proxy answered by itself before it asked, for example by a redirect: nothing was picked.
            return [ProxyReply(MessageKind.RESPONSE_HEAD)]
        self._step(_E.ANSWER)
        done = self._complete() if head.is_end else []
        return [Answered(head.status, head.served), ProxyReply(MessageKind.RESPONSE_HEAD), *done]

    def _answer_part(self, part: ResponsePart) -> list[Outgoing]:
        done = self._complete() if part.is_end else []
        if self._response_mode in DUPLEX:
            return [*_echo(part), *done]
        return [ProxyReply(MessageKind.RESPONSE_BODY), *done]

    def _complete(self) -> list[Outgoing]:
        if self.state not in (_S.ROUTED, _S.ANSWERING):
            return []
        self._step(_E.COMPLETE)
        return [Complete()]

    def _step(self, event: ExchangeEvent) -> None:
        self.state = EXCHANGE_MACHINE.next(self.state, event)


def _echo(part: RequestPart | ResponsePart) -> Iterator[ProxyReply]:
    """Yield the replies that send a part back, each of at most `PART_BYTES` bytes."""
    answered = MessageKind.REQUEST_BODY if isinstance(part, RequestPart) else MessageKind.RESPONSE_BODY
    data = part.data
    for start in range(0, max(1, len(data)), PART_BYTES):
        is_last = start + PART_BYTES >= len(data)
        yield ProxyReply(answered, None, data[start : start + PART_BYTES], part.is_end and is_last)


def _unexpected(what: str, state: ExchangeState) -> InvalidRequest:
    return InvalidRequest(
        f"the proxy sent {what} in state {state.value}; see Envoy's ext_proc protocol", reason="UNEXPECTED_MESSAGE"
    )
