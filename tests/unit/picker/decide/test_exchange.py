"""The exchange with the proxy: messages in, messages out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvalidRequest
from kvferry.picker.decide.exchange import (
    DUPLEX,
    EXCHANGE_MACHINE,
    PART_BYTES,
    Answered,
    Ask,
    BodyMode,
    Complete,
    Exchange,
    ExchangeState,
    MessageKind,
    PickedRoute,
    ProxyReply,
    Refusal,
    Refuse,
    RequestHead,
    RequestPart,
    RequestTrailers,
    ResponseHead,
    ResponsePart,
    ResponseTrailers,
)

ROUTE = PickedRoute(("10.0.0.1:8000",))
MAX = 200_000


def head(mode: BodyMode, *, is_end: bool = False, response: BodyMode = BodyMode.NONE) -> RequestHead:
    return RequestHead({":path": "/v1/completions"}, is_end, mode, response)


def test_full_duplex_answers_the_headers_after_the_body_and_sends_it_back() -> None:
    exchange = Exchange(MAX)
    assert exchange.on(head(BodyMode.FULL_DUPLEX)) == []
    assert exchange.on(RequestPart(b"ab", False)) == []
    assert exchange.on(RequestPart(b"c", True)) == [Ask(b"abc")]
    assert exchange.decided(ROUTE) == [
        ProxyReply(MessageKind.REQUEST_HEAD, ROUTE),
        ProxyReply(MessageKind.REQUEST_BODY, None, b"ab", False),
        ProxyReply(MessageKind.REQUEST_BODY, None, b"c", True),
    ]


def test_trailers_end_a_body() -> None:
    exchange = Exchange(MAX)
    exchange.on(head(BodyMode.FULL_DUPLEX))
    exchange.on(RequestPart(b"ab", False))
    assert exchange.on(RequestTrailers()) == [Ask(b"ab")]
    assert exchange.decided(ROUTE)[-2:] == [
        ProxyReply(MessageKind.REQUEST_BODY, None, b"ab", False),
        ProxyReply(MessageKind.REQUEST_TRAILERS),
    ]


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL])
def test_buffered_puts_the_route_into_the_answer_to_the_body(mode: BodyMode) -> None:
    exchange = Exchange(MAX)
    assert exchange.on(head(mode)) == [ProxyReply(MessageKind.REQUEST_HEAD)]
    assert exchange.on(RequestPart(b"abc", True)) == [Ask(b"abc")]
    assert exchange.decided(ROUTE) == [ProxyReply(MessageKind.REQUEST_BODY, ROUTE)]


def test_a_partial_body_is_cut() -> None:
    exchange = Exchange(MAX)
    exchange.on(head(BodyMode.BUFFERED_PARTIAL))
    assert exchange.on(RequestPart(b"abc", False)) == [Ask(b"abc", is_cut=True)]


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED, BodyMode.GRPC])
def test_without_a_whole_body_the_headers_decide(mode: BodyMode) -> None:
    exchange = Exchange(MAX)
    assert exchange.on(head(mode)) == [Ask(None)]
    assert exchange.decided(ROUTE) == [ProxyReply(MessageKind.REQUEST_HEAD, ROUTE)]
    echo = b"x" if mode in DUPLEX else None
    assert exchange.on(RequestPart(b"x", True)) == [ProxyReply(MessageKind.REQUEST_BODY, None, echo, echo is not None)]
    assert exchange.on(RequestTrailers()) == [ProxyReply(MessageKind.REQUEST_TRAILERS)]


@pytest.mark.parametrize("mode", BodyMode)
def test_a_request_without_a_body_is_decided_by_its_headers(mode: BodyMode) -> None:
    exchange = Exchange(MAX)
    assert exchange.on(head(mode, is_end=True)) == [Ask(None)]
    assert exchange.decided(ROUTE) == [ProxyReply(MessageKind.REQUEST_HEAD, ROUTE)]


@given(
    st.lists(st.binary(max_size=3 * PART_BYTES), min_size=1, max_size=5),
    st.integers(1, 4 * PART_BYTES),
    st.booleans(),
)
def test_what_comes_in_goes_out_whatever_the_limit(parts: list[bytes], limit: int, has_trailers: bool) -> None:
    exchange = Exchange(limit)
    exchange.on(head(BodyMode.FULL_DUPLEX))
    sent: list[ProxyReply] = []
    asks: list[Ask] = []
    most_held = 0
    messages: list[RequestPart | RequestTrailers] = [
        RequestPart(part, number == len(parts) - 1 and not has_trailers) for number, part in enumerate(parts)
    ]
    for message in (*messages, *([RequestTrailers()] if has_trailers else [])):
        found = exchange.on(message)
        asked = [one for one in found if isinstance(one, Ask)]
        asks += asked
        found = exchange.decided(ROUTE) if asked else found
        sent += [one for one in found if isinstance(one, ProxyReply)]
        most_held = max(most_held, sum(len(part.data) for part in exchange._held))
    assert len(asks) == 1
    body = b"".join(parts)
    assert asks[0].body == body[: min(limit, len(asks[0].body or b""))]
    assert asks[0].is_cut or asks[0].body == body
    assert most_held <= limit + 3 * PART_BYTES
    bodies = [reply for reply in sent if reply.part is MessageKind.REQUEST_BODY]
    assert b"".join(reply.echo or b"" for reply in bodies) == body
    assert all(len(reply.echo or b"") <= PART_BYTES for reply in bodies)
    assert [reply.is_end for reply in bodies].count(True) == (not has_trailers)
    assert sent[0] == ProxyReply(MessageKind.REQUEST_HEAD, ROUTE)
    assert (sent[-1].part is MessageKind.REQUEST_TRAILERS) == has_trailers


def test_a_refusal_ends_the_exchange() -> None:
    exchange = Exchange(MAX)
    exchange.on(head(BodyMode.NONE))
    refusal = Refusal(503, "none", "no_endpoints")
    assert exchange.decided(refusal) == [Refuse(refusal)]
    assert exchange.state is ExchangeState.DONE
    assert not exchange.closed()
    # Envoy may report its own response to the client.
    assert exchange.on(ResponseHead(503, "", True)) == [ProxyReply(MessageKind.RESPONSE_HEAD)]


def routed(response: BodyMode = BodyMode.FULL_DUPLEX) -> Exchange:
    exchange = Exchange(MAX)
    exchange.on(head(BodyMode.NONE, response=response))
    exchange.decided(ROUTE)
    return exchange


def test_the_response_is_followed_to_its_end() -> None:
    exchange = routed()
    served = "10.0.0.1:8000"
    assert exchange.on(ResponseHead(200, served, False)) == [
        Answered(200, served),
        ProxyReply(MessageKind.RESPONSE_HEAD),
    ]
    assert exchange.on(ResponsePart(b"x", False)) == [ProxyReply(MessageKind.RESPONSE_BODY, None, b"x", False)]
    assert exchange.on(ResponsePart(b"", True)) == [ProxyReply(MessageKind.RESPONSE_BODY, None, b"", True), Complete()]
    assert not exchange.closed()


def test_trailers_end_a_response() -> None:
    exchange = routed(BodyMode.STREAMED)
    exchange.on(ResponseHead(200, "", False))
    assert exchange.on(ResponsePart(b"x", False)) == [ProxyReply(MessageKind.RESPONSE_BODY)]
    assert exchange.on(ResponseTrailers()) == [ProxyReply(MessageKind.RESPONSE_TRAILERS), Complete()]


def test_a_response_of_headers_only_is_complete() -> None:
    assert routed().on(ResponseHead(204, "", True))[-1] == Complete()


@pytest.mark.parametrize("message", [RequestPart(b"", True), RequestTrailers()])
def test_messages_before_the_headers_are_refused(message: RequestPart | RequestTrailers) -> None:
    with pytest.raises(InvalidRequest, match="in state new"):
        Exchange(MAX).on(message)


def test_second_headers_are_refused() -> None:
    exchange = routed()
    with pytest.raises(InvalidRequest, match="request headers in state routed"):
        exchange.on(head(BodyMode.NONE))


def test_a_stream_may_end_in_every_state() -> None:
    for state in ExchangeState:
        exchange = Exchange(MAX)
        exchange.state = state
        assert exchange.closed() == (state is not ExchangeState.DONE)
        assert exchange.state is ExchangeState.DONE
        assert not exchange.closed()


_MESSAGES = st.sampled_from(
    [
        head(BodyMode.FULL_DUPLEX),
        head(BodyMode.BUFFERED),
        RequestPart(b"a", False),
        RequestPart(b"b", True),
        RequestTrailers(),
        ResponseHead(200, "", False),
        ResponsePart(b"c", True),
        ResponseTrailers(),
    ]
)


@given(st.lists(_MESSAGES, max_size=12))
def test_no_order_of_messages_breaks_it(messages: list[RequestHead | RequestPart]) -> None:
    exchange = Exchange(MAX)
    num_complete = 0
    for message in messages:
        try:
            found = exchange.on(message)
        except InvalidRequest:
            break
        while asked := [one for one in found if isinstance(one, Ask)]:
            assert len(asked) == 1
            found = exchange.decided(ROUTE)
        num_complete += sum(isinstance(one, Complete) for one in found)
    assert num_complete <= 1
    exchange.closed()


def test_each_state_is_reached() -> None:
    reached = {EXCHANGE_MACHINE.initial, *EXCHANGE_MACHINE.table.values()}
    assert reached == set(ExchangeState)
