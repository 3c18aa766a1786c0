"""Required calls through the engine: even with random weights, each answer is calls that fit their schemas."""

import json
from typing import Any

import jsonschema
import pytest

from kvferry.core.inference.tool_calls import AssembledCalls
from kvferry.core.inference.tools import Tool, ToolMode, ToolUse
from kvferry.core.sampling import FinishReason
from kvferry.engine import LLM, SamplingParams
from kvferry.model.source import open_model
from kvferry.serving.model_text import text_model_of
from kvferry.serving.prompts import prepare_chat
from kvferry.text.answers.answer import AnswerSplitter

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "東京"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
FIND: dict[str, Any] = {
    "type": "object",
    "properties": {
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "near": {"type": "object", "properties": {"m": {"type": "integer", "minimum": 0, "maximum": 99}}},
    },
    "required": ["zip", "near"],
}
CLOSED_FIND = {
    **FIND,
    "additionalProperties": False,
    "properties": {**FIND["properties"], "near": {**FIND["properties"]["near"], "additionalProperties": False}},
}
"""Objects of arguments have no members besides those in `properties`."""
TOOLS = (Tool("get_weather", "Forecast.", WEATHER), Tool("now"), Tool("find", "Places.", FIND))
SCHEMAS = {"get_weather": WEATHER, "find": CLOSED_FIND, "now": {}}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", dtype="float32", kv_memory=16 << 20)


@pytest.mark.parametrize(
    "use",
    [
        ToolUse(TOOLS, ToolMode.REQUIRED, is_parallel=False),
        ToolUse(TOOLS, ToolMode.REQUIRED, "get_weather"),
        ToolUse(TOOLS, ToolMode.REQUIRED, "now"),
        ToolUse(TOOLS, ToolMode.REQUIRED, "find"),
    ],
    ids=["any", "get_weather", "now", "find"],
)
def test_every_answer_is_a_call_that_fits(llm: LLM, use: ToolUse) -> None:
    model = text_model_of(open_model("tiny"))
    names: set[str] = set()
    for seed in range(8):
        sampling = SamplingParams(max_tokens=400, seed=seed)
        chat = prepare_chat(model, [{"role": "user", "content": "hi"}], use, sampling)
        (result,) = llm.generate([list(chat.token_ids)], chat.sampling)
        assert chat.split is not None
        assert result.finish_reason is FinishReason.STOP
        splitter = AnswerSplitter(model.answer_form, chat.split)
        detokenizer = model.new_detokenizer(False, model.answer_form.marks.by_token)
        calls = AssembledCalls()
        parts = [splitter.feed(detokenizer.feed(result.token_ids)), splitter.finish()]
        for part in parts:
            calls.add(part.calls)
        (call,) = calls.whole()
        assert "".join(part.content for part in parts) == ""
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        names.add(call.name)
    assert names <= ({use.function} if use.function else SCHEMAS.keys())
