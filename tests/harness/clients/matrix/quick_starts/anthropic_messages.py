"""Anthropic's library: messages, streams, tools, counts."""

import sys

import anthropic

URL, MODEL = sys.argv[1:]
CLIENT = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
TOOL = {
    "name": "get_weather",
    "description": "Returns the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
        "required": ["city"],
    },
}
QUESTION = {"role": "user", "content": "Is it sunny in Paris?"}
COMMON = {"model": MODEL, "extra_body": {"temperature": 0}}

assert CLIENT.messages.create(**COMMON, messages=[QUESTION], max_tokens=8).content[0].text
with CLIENT.messages.stream(**COMMON, messages=[QUESTION], max_tokens=8) as stream:
    assert "".join(stream.text_stream)
called = CLIENT.messages.create(
    **COMMON,
    messages=[QUESTION],
    max_tokens=60,
    tools=[TOOL],
    tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
)
(use,) = [block for block in called.content if block.type == "tool_use"]
result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
messages = [QUESTION, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
assert CLIENT.messages.create(**COMMON, messages=messages, max_tokens=8, tools=[TOOL]).usage.output_tokens
assert CLIENT.messages.count_tokens(model=MODEL, messages=messages, tools=[TOOL]).input_tokens

try:
    CLIENT.messages.create(**COMMON, messages=[{"role": "user", "content": "hello " * 9000}], max_tokens=8)
except anthropic.BadRequestError as error:
    assert "prompt is too long" in error.message
else:
    raise AssertionError("the context overflowed without an error")
