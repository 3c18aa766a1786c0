"""Streams of chunks are read however they are split, and a part of an event is never an event."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.chatting.received_answer import PartKind, ReceivedAnswer
from kvferry.cli.chatting.stream_events import DONE, ServerSentEvents, parse_chunk, timing_of
from kvferry.core.errors import Unavailable

TIMING = {"queue_seconds": 0.1, "first_token_seconds": 0.5, "total_seconds": 1.0, "prefill_worker": "a", "new": 1}
EVENTS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None},
    {"choices": [{"index": 0, "delta": {"reasoning": "hm", "reasoning_content": "hm"}}]},
    {"choices": [{"index": 0, "delta": {"content": "Grüße 👋"}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{"}}]}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": '"a": 1}'}}]}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}},
        "kvferry": TIMING,
    },
]
STREAM = b": keep-alive\n\n" + b"".join(
    f"data: {json.dumps(one, ensure_ascii=False)}\r\n\r\n".encode() for one in EVENTS
)
STREAM += b"event: x\nid: 3\ndata:[DONE]\n\n"


def read(parts: list[bytes]) -> list[str]:
    events = ServerSentEvents()
    return [data for part in parts for data in events.feed(part)]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_do_not_depend_on_how_the_bytes_are_split(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    found = read([STREAM[begin:end] for begin, end in itertools.pairwise(places)])
    assert found == [*(json.dumps(one, ensure_ascii=False) for one in EVENTS), DONE]


@given(st.integers(0, len(STREAM)))
def test_a_cut_stream_has_only_whole_events(cut: int) -> None:
    found = read([STREAM[:cut]])
    assert found == read([STREAM])[: len(found)]
    assert (DONE in found) is (cut == len(STREAM))


def test_lines_of_an_event_are_joined() -> None:
    assert read([b"data: a\ndata:  b\n\n\n"]) == ["a\n b"]


@pytest.mark.parametrize("sent", [b"data: " + b"x" * (5 << 20), b"data: x\n" * (5 << 20), b"data: \xff\n\n"])
def test_an_event_that_is_too_large_or_not_text_breaks_the_stream(sent: bytes) -> None:
    with pytest.raises(Unavailable, match="the stream is broken"):
        read([sent])


def test_an_answer_is_assembled() -> None:
    answer = ReceivedAnswer(sent_at=10.0)
    parts = [part for at, event in enumerate(EVENTS) for part in answer.add(parse_chunk(json.dumps(event)), 11.0 + at)]
    assert parts == [
        (PartKind.REASONING, "hm"),
        (PartKind.TEXT, "Grüße 👋"),
        (PartKind.CALL, "\n[call f] {"),
        (PartKind.CALL, '"a": 1}'),
    ]
    assert answer.content == 'Grüße 👋\n[call f] {"a": 1}'
    assert (answer.finish_reason, answer.ttft_seconds, answer.total_seconds) == ("stop", 2.0, 7.0)
    assert answer.timing is not None
    assert (answer.timing.total_seconds, answer.timing.prefill_worker) == (1.0, "a")


@pytest.mark.parametrize(
    "data", ["", "1", "[]", "null", "{", '{"choices": 1}', '{"choices": [{"delta": 1}]}', "[" * 10**5]
)
def test_what_is_no_chunk_breaks_the_stream(data: str) -> None:
    with pytest.raises(Unavailable, match="not a chunk of a chat"):
        parse_chunk(data)


@pytest.mark.parametrize(
    "timing", [None, 1, "x", {"total_seconds": "x"}, {"total_seconds": -1}, {"queue_seconds": 1e308}]
)
def test_a_timing_that_cannot_be_used_is_left_out(timing: object) -> None:
    assert timing_of(parse_chunk(json.dumps({"choices": [], "kvferry": timing}))) is None


def test_chunks_of_other_servers_need_no_fields() -> None:
    chunk = parse_chunk('{"x": 1}')
    assert ReceivedAnswer(0.0).add(chunk, 1.0) == []
    assert timing_of(chunk) is None
