"""Outputs of conversations are split into text, reasoning and calls, streamed or whole."""

import json

import pytest

from kvferry.core.errors import InvariantBroken
from kvferry.core.sampling import FinishReason, SampledToken, SamplingParams
from kvferry.engine import LLM
from kvferry.engine.offline.completion import CompletionStream
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate
from kvferry.text.tools.definitions import Tool, ToolUse
from kvferry.text.tools.inputs import use_from_input

TOOL = Tool("get_weather", "Returns the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
USER = [{"role": "user", "content": "How is the weather in Rome?"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", dtype="float32", kv_bytes=16 << 20)


def feed(llm: LLM, made: CompletionStream, text: str, size: int) -> list[str]:
    """Add a text as tokens, `size` at a time; return the texts of the parts."""
    tokens = [SampledToken(token) for token in llm.tokenizer.encode(text, add_special=False)]
    texts: list[str] = []
    for start in range(0, len(tokens), size):
        reason = FinishReason.STOP if start + size >= len(tokens) else None
        update = SequenceUpdate(made.request.request_id, tuple(tokens[start : start + size]), reason, 3)
        part = made.add(update)
        texts.append(part.text)
        assert part.finish_reason is reason
    return texts


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_are_not_part_of_the_text(llm: LLM, size: int) -> None:
    made = llm._requests.start_chat(USER, SamplingParams(seed=1), use_from_input([TOOL], "auto", is_parallel=True))
    texts = feed(llm, made, f"Let me look.{CALL}", size)
    whole = made.completion()
    assert "".join(texts) == whole.text == "Let me look."
    (call,) = whole.tool_calls
    assert call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Rome"}
    assert whole.num_cached_tokens == 3
    assert "tool_call" in llm.tokenizer.decode(whole.token_ids)


def test_without_functions_the_text_is_unchanged(llm: LLM) -> None:
    made = llm._requests.start_chat(USER, SamplingParams(seed=1), ToolUse())
    feed(llm, made, CALL, 5)
    assert made.completion().text == CALL
    assert made.completion().tool_calls == ()


def test_an_unfinished_output_is_not_whole(llm: LLM) -> None:
    made = llm._requests.start("hello", SamplingParams(seed=1))
    with pytest.raises(InvariantBroken, match="not ended"):
        made.completion()
