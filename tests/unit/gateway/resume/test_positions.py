"""A stream that is continued at any position is the same stream: text, reasoning, calls, log-probabilities, usage."""

import asyncio
import functools
import itertools
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from harness.fakes.byte_model import byte_model
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.clock import SystemClock
from kvferry.core.errors import InvalidRequest, ResumeRefused
from kvferry.core.ids import RequestId
from kvferry.core.sampling import FinishReason, SampledToken
from kvferry.gateway.http.openai import completions
from kvferry.gateway.http.openai.generation import Generation, prepare_chat, prepare_completion
from kvferry.gateway.observe.instruments import GatewayInstruments
from kvferry.gateway.resume.event_ids import EventId, EventIds, EventPart, created_of, new_stream_id
from kvferry.gateway.resume.recorded_source import RecordedSource
from kvferry.gateway.resume.stream_records import StreamRecord, StreamRecords
from kvferry.gateway.resume.stream_store import RecordLimits, StreamStore, WriteResult
from kvferry.gateway.resume.token_batches import RecordedTokens, StreamHeader
from kvferry.gateway.state.pool_seal import PoolSeal
from kvferry.gateway.state.state_client import StateClient
from kvferry.gateway.state.state_url import StateServer
from kvferry.serving.request import Caller, Request
from kvferry.serving.text_service import TextService
from kvferry.serving.token_source import TokenEvent
from kvferry.text.answers.registry import CallFormat

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12345}}\n</tool_call>'
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, tuple[bool, dict[str, Any]]] = {
    "chat": (True, {"messages": HI}),
    "chat with usage": (True, {"messages": HI, "stream_options": {"include_usage": True}}),
    "running usage": (
        True, {"messages": HI, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "stop": (True, {"messages": HI, "stop": ["STOP", "lo w"]}),
    "stop with token ids": (True, {"messages": HI, "stop": ["STOP", "lo w"], "return_token_ids": True}),
    "included stop": (True, {"messages": HI, "stop": ["STOP"], "include_stop_str_in_output": True}),
    "stop token": (True, {"messages": HI, "stop_token_ids": [ord("!")]}),
    "tools": (True, {"messages": HI, "tools": TOOLS}),
    "one call": (True, {"messages": HI, "tools": TOOLS, "parallel_tool_calls": False}),
    "logprobs": (True, {"messages": HI, "logprobs": True, "top_logprobs": 2}),
    "token ids": (True, {"messages": HI, "return_token_ids": True}),
    "text": (False, {"prompt": "hi"}),
    "text with echo": (False, {"prompt": "hi", "echo": True}),
    "text with logprobs": (False, {"prompt": "hi", "logprobs": 1, "stream_options": {"include_usage": True}}),
    "text with stop": (False, {"prompt": "hi", "stop": "STOP"}),
}  # fmt: skip
ANSWERS = (
    "hello world!", "héllo wörld 東京 🗼", "hello STOP here", "", "a", f"Let me add. {CALL}", f"{CALL}\n{CALL}",
    "<think>why not</think>because", "<think>unfinished", f"<think>hm</think>{CALL}", "hello wo", "ST", "<tool_call>{",
)  # fmt: skip


@dataclass
class Grouped:
    """A source that generates prepared tokens in groups of given sizes; the end may be an event of its own."""

    tokens: Sequence[SampledToken]
    sizes: Sequence[int]
    finish: FinishReason
    ends_apart: bool
    given: list[Request] = field(default_factory=list)

    async def stream(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        self.given.append(request)
        left = list(self.tokens[len(request.prior_ids) :])
        assert [token.token_id for token in self.tokens[: len(request.prior_ids)]] == list(request.prior_ids)
        number = 0
        while left:
            size = self.sizes[number % len(self.sizes)]
            number += 1
            step, left = left[:size], left[size:]
            is_last = not left and not self.ends_apart
            yield TokenEvent(tuple(step), self.finish if is_last else None, 3, num_written_tokens=1)
            if is_last:
                return
        yield TokenEvent((), self.finish, 3, num_written_tokens=1)


def tokens_of(answer: str, *, logprobs: bool) -> list[SampledToken]:
    if not logprobs:
        return [SampledToken(byte) for byte in answer.encode()]
    return [SampledToken(byte, -0.25 * (at % 7), ((byte, -0.5), (65, -1.5))) for at, byte in enumerate(answer.encode())]


SEAL = PoolSeal(b"key")


@functools.cache
def unwritten_records() -> StreamRecords:
    """Return records that are never written: nothing runs the writer."""
    store = StreamStore(StateClient(StateServer("redis://127.0.0.1:1", "127.0.0.1", 1)), SEAL.pool, RecordLimits())
    return StreamRecords(store, SystemClock(), GatewayInstruments())


def unwritten(prior: RecordedTokens) -> StreamRecord:
    header, count = StreamHeader("r", b"", "", ""), len(prior.tokens)
    return StreamRecord(unwritten_records(), b"m", SEAL.seal(b"m"), header, num_written=count, running_seconds=60)


async def generation_of(kind: str, source: Any) -> Generation:
    is_chat, fields = BODIES[kind]
    service = TextService(source, byte_model(4096, CallFormat.HERMES, has_reasoning=is_chat))
    body = json.dumps({**fields, "stream": True, "max_tokens": 1000, "seed": 1}).encode()
    caller = Caller(RequestId("r"))
    made = await (prepare_chat(service, caller, body) if is_chat else prepare_completion(service, caller, body, 4))
    return replace(made, created=7)


async def events_of(
    kind: str, source: Grouped, stream_id: str, after: EventId | None = None, prior: RecordedTokens | None = None
) -> list[bytes]:
    prior = prior or RecordedTokens()
    recorded = RecordedSource(source, unwritten(prior), prior, after)
    generation = await generation_of(kind, recorded)
    ids = EventIds(stream_id, b"digest", after)
    async with aclosing(completions.events(generation, ids)) as events:
        return [event async for event in events]


def parsed(event: bytes) -> tuple[str, dict[str, Any]]:
    line, data = event.decode().strip().split("\n")
    assert line.startswith("id: ")
    assert data.startswith("data: ")
    return line.removeprefix("id: "), json.loads(data.removeprefix("data: "))


def assembled(events: Sequence[bytes]) -> dict[str, Any]:
    """Return what a client has after the events, whatever their grouping."""
    whole: dict[str, Any] = {"text": "", "reasoning": "", "calls": {}, "logprobs": [], "ids": [], "finish": []}
    for _, data in map(parsed, events):
        if data.get("usage") is not None and not data["choices"]:
            whole["usage"] = data["usage"]
        for choice in data["choices"]:
            delta = choice.get("delta", {"content": choice.get("text")})
            whole["text"] += delta.get("content") or ""
            whole["reasoning"] += delta.get("reasoning") or ""
            whole["ids"] += choice.get("token_ids") or []
            if "role" in delta:
                whole.setdefault("roles", []).append(delta["role"])
            for call in delta.get("tool_calls") or []:
                found = whole["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
                found["name"] += call["function"].get("name") or ""
                found["arguments"] += call["function"]["arguments"]
            logprobs = choice.get("logprobs")
            if logprobs is not None:
                whole["logprobs"] += logprobs["content"] if "content" in logprobs else logprobs["token_logprobs"]
                whole.setdefault("offsets", []).extend(logprobs.get("text_offset", []))
            if choice["finish_reason"] is not None:
                whole["finish"].append((choice["finish_reason"], choice["stop_reason"]))
    return whole


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", BODIES)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_stream_continues_with_the_same_rest_from_any_event(kind: str, data: st.DataObject) -> None:
    answer = data.draw(st.sampled_from(ANSWERS) | st.text(alphabet="abé🗼<>tool_cal!STOP {}\n", max_size=40))
    finish = data.draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    tokens = tokens_of(answer, logprobs="logprobs" in kind)
    first = Grouped(tokens, data.draw(SIZES), finish, data.draw(st.booleans()))
    second = Grouped(tokens, data.draw(SIZES), finish, data.draw(st.booleans()))
    stream_id = new_stream_id(1e9)

    async def run() -> None:
        whole = await events_of(kind, first, stream_id)
        position = data.draw(st.integers(0, len(whole) - 1))
        after = EventId.parse(parsed(whole[position])[0])
        # The record may have less than the client, and more.
        num_recorded = data.draw(st.integers(0, len(tokens)))
        is_all = num_recorded == len(tokens) and data.draw(st.booleans())
        prior = RecordedTokens(tuple(tokens[:num_recorded]), finish if is_all else None, num_cached=3, num_written=1)
        rest = await events_of(kind, second, stream_id, after, prior)
        assert assembled([*whole[: position + 1], *rest]) == assembled(whole)
        assert all(request.prior_ids == tuple(t.token_id for t in prior.tokens) for request in second.given)

    asyncio.run(run())


@pytest.mark.parametrize("apart", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("answer", ["hello wo", "héllo 🗼 STOP", "hi!", f"<think>hm</think>{CALL}"])
@pytest.mark.parametrize("kind", ["stop with token ids", "stop token", "tools", "text with logprobs"])
async def test_each_position_of_short_answers(kind: str, answer: str, apart: tuple[bool, bool]) -> None:
    tokens = tokens_of(answer, logprobs="logprobs" in kind)
    stream_id = new_stream_id(1e9)
    whole = await events_of(kind, Grouped(tokens, [3, 1], FinishReason.STOP, apart[0]), stream_id)
    for position, event in enumerate(whole):
        after = EventId.parse(parsed(event)[0])
        for count, sizes in itertools.product((0, len(tokens) // 2), ([100], [1])):
            second = Grouped(tokens, sizes, FinishReason.STOP, apart[1])
            rest = await events_of(
                kind, second, stream_id, after, RecordedTokens(tuple(tokens[:count]), None, num_cached=3, num_written=1)
            )
            assert assembled([*whole[: position + 1], *rest]) == assembled(whole), (position, count, sizes)


async def test_a_stream_that_is_continued_elsewhere_ends_with_an_error() -> None:
    source = Grouped(tokens_of("hello world", logprobs=False), [1], FinishReason.STOP, ends_apart=False)
    record = unwritten(RecordedTokens())
    generation = await generation_of("chat", RecordedSource(source, record))
    async with aclosing(completions.events(generation, EventIds(new_stream_id(1e9), b"digest"))) as events:
        assert [parsed(await anext(events))[1]["choices"][0]["delta"] for _ in range(2)]
        found = record.next_write()
        assert found is not None
        record.written(WriteResult.FENCED, *found)
        with pytest.raises(ResumeRefused, match="another gateway"):
            await anext(events)


async def test_other_tokens_than_the_clients_are_refused() -> None:
    first = Grouped(tokens_of("hello world", logprobs=False), [2], FinishReason.STOP, False)
    other = replace(first, tokens=tokens_of("hellO world", logprobs=False))
    stream_id = new_stream_id(1e9)
    whole = await events_of("chat", first, stream_id)
    for event in whole[4:]:
        with pytest.raises(ResumeRefused, match="send the body of the first request unchanged"):
            await events_of("chat", other, stream_id, EventId.parse(parsed(event)[0]))


async def test_a_position_after_the_end_is_refused() -> None:
    source = Grouped(tokens_of("hello", logprobs=False), [2], FinishReason.STOP, False)
    forged = EventId(new_stream_id(1e9), 500, EventPart.TEXT, 0)
    with pytest.raises(ResumeRefused, match="has 500 tokens"):
        await events_of("chat", source, forged.stream_id, forged)


async def test_a_beginning_of_another_request_is_refused_at_once() -> None:
    forged = EventId(new_stream_id(1e9), 0, EventPart.TEXT, 12)
    with pytest.raises(ResumeRefused):
        EventIds(forged.stream_id, b"digest", forged)


@given(st.text(max_size=60))
def test_any_text_is_an_id_or_refused_by_name(text: str) -> None:
    with suppress(InvalidRequest):
        assert str(EventId.parse(text)) == text.strip()


@given(st.integers(0, 9_999_999), st.sampled_from(EventPart), st.integers(0, 2**32 - 1), st.floats(0, 4e9))
def test_ids_are_read_as_they_were_written(count: int, part: EventPart, check: int, now: float) -> None:
    made = EventId(new_stream_id(now), count, part, check)
    assert EventId.parse(str(made)) == made
    assert created_of(made.stream_id) == int(now)
