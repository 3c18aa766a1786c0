"""Outputs of conversations are split into text, reasoning and calls, streamed or whole."""

import json
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from kvferry.core.errors import InvariantBroken
from kvferry.core.inference.tool_inputs import use_from_input
from kvferry.core.inference.tools import Tool, ToolUse
from kvferry.core.sampling import FinishReason, SampledToken, SamplingParams
from kvferry.engine import LLM
from kvferry.engine.offline.completion import CompletionPart, parts
from kvferry.serving.request import Request
from kvferry.serving.token_source import TokenEvent

TOOL = Tool("get_weather", "Returns the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
USER = [{"role": "user", "content": "How is the weather in Rome?"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", dtype="float32", kv_memory=16 << 20)


class Scripted:
    """A source that yields the tokens of a text, `size` at a time; without an end if `is_cut`."""

    def __init__(self, tokens: list[int], size: int, *, is_cut: bool = False) -> None:
        self.tokens, self.size, self.is_cut = tokens, size, is_cut

    async def stream(self, _request: Request) -> AsyncGenerator[TokenEvent, None]:
        for start in range(0, len(self.tokens), self.size):
            part = tuple(map(SampledToken, self.tokens[start : start + self.size]))
            is_last = start + self.size >= len(self.tokens) and not self.is_cut
            yield TokenEvent(part, FinishReason.STOP if is_last else None, 3)


async def feed(llm: LLM, request: Request, text: str, size: int, *, is_cut: bool = False) -> list[CompletionPart]:
    """Return the parts of a completion whose text is `text`."""
    source = Scripted(llm.tokenizer.encode(text, add_special=False), size, is_cut=is_cut)
    chunks = replace(llm._requests.service, source=source).generate(request)
    return [part async for part in parts(request, chunks)]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_calls_are_not_part_of_the_text(llm: LLM, size: int) -> None:
    request = llm._requests.answer(USER, SamplingParams(seed=1), use_from_input([TOOL], "auto", is_parallel=True))
    found = await feed(llm, request, f"Let me look.{CALL}", size)
    whole = found[-1].completion
    assert whole is not None
    assert all(part.finish_reason is None for part in found[:-1])
    assert "".join(part.text for part in found) == whole.text == "Let me look."
    (call,) = whole.tool_calls
    assert call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Rome"}
    assert whole.num_cached_tokens == 3
    assert "tool_call" in llm.tokenizer.decode(whole.token_ids)


async def test_without_functions_the_text_is_unchanged(llm: LLM) -> None:
    found = await feed(llm, llm._requests.answer(USER, SamplingParams(seed=1), ToolUse()), CALL, 5)
    assert found[-1].completion is not None
    assert found[-1].completion.text == CALL
    assert found[-1].completion.tool_calls == ()


async def test_an_unfinished_output_is_not_whole(llm: LLM) -> None:
    with pytest.raises(InvariantBroken, match="without a reason"):
        await feed(llm, llm._requests.completion("hello", SamplingParams(seed=1)), "hello", 5, is_cut=True)
