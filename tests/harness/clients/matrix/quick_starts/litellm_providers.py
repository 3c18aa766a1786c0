"""LiteLLM as a library: providers `openai`, `hosted_vllm` and `anthropic`, and the overflow of the context."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download at import

import litellm
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
QUESTION = {"role": "user", "content": "Is it sunny in Paris?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS}}


class Answer(BaseModel):
    """An answer."""

    sunny: bool


for provider, base in (("openai", f"{URL}/v1"), ("hosted_vllm", f"{URL}/v1"), ("anthropic", URL)):
    common = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none", "temperature": 0}
    assert litellm.completion(messages=[QUESTION], max_tokens=8, **common).choices[0].message.content
    assert list(litellm.completion(messages=[QUESTION], max_tokens=8, stream=True, **common))
    called = litellm.completion(messages=[QUESTION], max_tokens=80, tools=[TOOL], tool_choice="required", **common)
    message = called.choices[0].message
    assert message.tool_calls[0].function.name == "get_weather"
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    turns = [QUESTION, message.model_dump(), *results]
    assert litellm.completion(messages=turns, max_tokens=8, tools=[TOOL], **common).usage.completion_tokens
    parsed = litellm.completion(messages=[QUESTION], max_tokens=80, response_format=Answer, **common)
    Answer.model_validate_json(parsed.choices[0].message.content)
    for stream in (False, True):
        try:
            list(litellm.completion(messages=[{"role": "user", "content": "hello " * 9000}], stream=stream, **common))
        except litellm.ContextWindowExceededError:
            continue
        raise AssertionError(f"{provider}: the context overflowed without its error")
