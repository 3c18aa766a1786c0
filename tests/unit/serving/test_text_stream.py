import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from harness.fakes.byte_model import byte_model
from harness.fakes.scripted_tokens import ScriptedSource, expected_tokens
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.clock import ManualClock
from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest, InvariantBroken, Unavailable
from kvferry.core.ids import RequestId
from kvferry.core.inference.beams import BeamParams
from kvferry.core.inference.chunks import TextChunk, Usage
from kvferry.core.sampling import FinishReason, SampledToken, SamplingParams
from kvferry.serving.request import Caller, Request
from kvferry.serving.text_service import TextService, generate_text
from kvferry.serving.token_source import TokenEvent
from kvferry.text.answers.answer import SplitOptions

_PROMPT = [104, 105]


def request(n: int = 1, **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 20, "seed": 1, **sampling})
    return Request(Caller(RequestId("r")), _PROMPT, params, num_samples=n)


async def collect(source: Any, text_request: Request) -> list[TextChunk]:
    async with aclosing(generate_text(source, byte_model(), text_request, ManualClock(now=4.0))) as chunks:
        return [chunk async for chunk in chunks]


def text_of(chunks: list[TextChunk], index: int = 0) -> str:
    return "".join(chunk.text for chunk in chunks if chunk.index == index)


class StepSource:
    """A source of given events."""

    def __init__(self, *events: TokenEvent) -> None:
        self.events = events
        self.closed = False

    async def stream(self, request: Any) -> AsyncGenerator[TokenEvent, None]:
        try:
            for event in self.events:
                yield event
        finally:
            self.closed = True


def step(text: str, finish: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(tuple(SampledToken(byte) for byte in text.encode()), finish)


async def test_a_sample_ends_with_reason_usage_and_timing():
    chunks = await collect(ScriptedSource(), request())
    assert text_of(chunks).encode() == bytes(expected_tokens(_PROMPT, request().sampling, 20))
    last = chunks[-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert last.usage == Usage(prompt_tokens=2, output_tokens=20, cached_tokens=3, cache_write_tokens=1)
    assert last.timing is not None
    assert (last.timing.prefill_worker, last.timing.total_seconds) == ("here", 4.0)
    assert all(chunk.usage is None and chunk.finish_reason is None for chunk in chunks[:-1])


async def test_characters_are_never_split():
    chunks = await collect(ScriptedSource(text="naïve 🦀"), request())
    assert text_of(chunks) == "naïve 🦀"
    assert "�" not in "".join(chunk.text for chunk in chunks)


async def test_half_a_character_at_the_end_is_a_replacement_character():
    chunks = await collect(ScriptedSource(text="ab🦀"), request(max_tokens=4))
    assert text_of(chunks) == "ab�"


@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3))
def test_text_is_cut_before_the_first_stop_string(text, stops):
    source = ScriptedSource(text=text)
    chunks = asyncio.run(collect(source, request(max_tokens=50, stop=tuple(stops))))
    # The reference is the earliest end at which the text so far contains a stop string.
    for end in range(1, len(text) + 1):
        starts = [at for stop in stops if (at := text[:end].find(stop)) >= 0]
        if starts:
            assert text_of(chunks) == text[: min(starts)]
            assert source.num_yielded == end
            break
    else:
        assert text_of(chunks) == text
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert source.open_streams == 0


async def test_tokens_of_a_step_after_the_stop_string_do_not_count():
    source = StepSource(step("xSTOPyz"), step("more", FinishReason.LENGTH))
    chunks = await collect(source, request(stop=("STOP",)))
    assert text_of(chunks) == "x"
    assert chunks[-1].usage == Usage(2, 5)
    assert bytes(t.token_id for t in chunks[-1].tokens) == b"xSTOP"
    assert source.closed


async def test_samples_differ_and_arrive_complete():
    text_request = request(n=3)
    chunks = await collect(ScriptedSource(), text_request)
    for index in range(3):
        assert text_of(chunks, index).encode() == bytes(expected_tokens(_PROMPT, text_request.sampling, 20, index))
    assert len({text_of(chunks, index) for index in range(3)}) == 3
    assert sorted(chunk.index for chunk in chunks if chunk.usage) == [0, 1, 2]


@pytest.mark.parametrize("n", [1, 3])
async def test_closing_early_closes_every_stream(n):
    source = ScriptedSource()
    async with aclosing(generate_text(source, byte_model(), request(n=n), ManualClock())) as chunks:
        await anext(chunks)
        assert source.open_streams == n
    assert source.open_streams == 0


async def test_one_failing_sample_stops_the_others():
    class OneFails(ScriptedSource):
        async def stream(self, request: Any) -> AsyncGenerator[TokenEvent, None]:
            async with aclosing(super().stream(request)) as events:
                async for event in events:
                    if request.sample_index == 1:
                        raise Unavailable("lost")
                    yield event

    source = OneFails()
    with pytest.raises(Unavailable, match="lost"):
        await collect(source, request(n=3, max_tokens=1000))
    assert source.open_streams == 0


async def test_a_stream_that_ends_without_a_reason_is_an_internal_error():
    with pytest.raises(InvariantBroken, match="after 2 tokens"):
        await collect(StepSource(step("ab")), request())


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_tokens_after_the_last_call_do_not_count_however_they_are_grouped(sizes: list[int]) -> None:
    text, steps, start = CALL + "more text" * 30, [], 0
    for size in [*sizes, len(text)]:
        steps.append(step(text[start : start + size]))
        start += size
    text_request = replace(request(), split=SplitOptions(("f",), max_calls=1))
    chunks = asyncio.run(collect(StepSource(*steps), text_request))
    assert chunks[-1].usage == Usage(2, CALL.index("\n</tool_call>"))
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert text_of(chunks) == ""


@pytest.mark.parametrize("length", range(0, len(CALL), 3))
async def test_a_required_call_that_is_cut_off_is_no_content(length: int) -> None:
    source = StepSource(step(CALL[:length], FinishReason.LENGTH))
    chunks = await collect(source, replace(request(), split=SplitOptions(("f",), has_only_calls=True)))
    assert text_of(chunks) == ""
    assert chunks[-1].finish_reason is FinishReason.LENGTH


class Spelled:
    """A source of single tokens that spell a text; the next most likely token is always far less likely."""

    def __init__(self, text: str) -> None:
        self.tokens = [*text.encode(), *byte_model().eos_token_ids]

    async def stream(self, request: Any) -> AsyncGenerator[TokenEvent, None]:
        token = self.tokens[len(request.token_ids) - len(_PROMPT)]
        yield TokenEvent((SampledToken(token, -0.1, ((token, -0.1), (7, -50.0))),), FinishReason.LENGTH)


async def test_calls_are_split_from_the_outputs_of_a_beam_search() -> None:
    text_request = replace(request(max_tokens=200), split=SplitOptions(("f",)), beams=BeamParams(1, max_tokens=200))
    (chunk,) = await collect(Spelled(f"so {CALL}"), text_request)
    assert chunk.text.strip() == "so"
    assert [delta.name for delta in chunk.tool_calls if delta.name] == ["f"]
    assert chunk.finish_reason is FinishReason.STOP


def test_a_constraint_cannot_be_combined_with_a_beam_search() -> None:
    service = TextService(ScriptedSource(), byte_model(), ManualClock(), new_seed=lambda: 1)
    constraint = Constraint(ConstraintKind.REGEX, "a")
    with pytest.raises(InvalidRequest, match="cannot be combined with a beam search"):
        service.fit(replace(request(constraint=constraint), beams=BeamParams(1)))


SIZES = st.lists(st.integers(1, 9), max_size=30)
STOPS = st.sampled_from(["\n\n", "END", "x"])


def of_sizes(sizes: list[int], stop: str, split: SplitOptions) -> list[TextChunk]:
    """Return the chunks of an answer with reasoning, whose steps have these numbers of characters."""
    text, steps, start = "<think>\nxEND\n\nEND</think>\n\nok END\n\nx more", [], 0
    for size in [*sizes, len(text)]:
        steps.append(step(text[start : start + size], None if start + size < len(text) else FinishReason.LENGTH))
        start += size
        if start >= len(text):
            break
    model = byte_model(has_reasoning=True)
    text_request = replace(request(stop=(stop,)), split=split)

    async def collected() -> list[TextChunk]:
        async with aclosing(generate_text(StepSource(*steps), model, text_request, ManualClock())) as chunks:
            return [chunk async for chunk in chunks]

    return asyncio.run(collected())


@given(SIZES, STOPS)
def test_stop_strings_end_the_answer_and_not_the_reasoning(sizes: list[int], stop: str) -> None:
    chunks = of_sizes(sizes, stop, SplitOptions())
    assert "".join(chunk.reasoning for chunk in chunks) == "xEND\n\nEND"
    answer = "ok END\n\nx more"
    assert text_of(chunks) == answer[: answer.index(stop)]
    assert chunks[-1].finish_reason is FinishReason.STOP


@given(SIZES, STOPS)
def test_stop_strings_end_the_reasoning_by_option(sizes: list[int], stop: str) -> None:
    chunks = of_sizes(sizes, stop, SplitOptions(stops_in_reasoning=True))
    reasoning = "xEND\n\nEND"
    assert "".join(chunk.reasoning for chunk in chunks) == reasoning[: reasoning.index(stop)].rstrip()
    assert text_of(chunks) == ""
    assert chunks[-1].finish_reason is FinishReason.STOP
