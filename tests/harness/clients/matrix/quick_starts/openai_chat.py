"""OpenAI's library: chat, streams, functions, structured outputs, Responses, embeddings."""

import sys

import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Returns the weather.", "strict": True, "parameters": PARAMETERS}
MESSAGES = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Is it sunny in Paris?"}]


class Answer(BaseModel):
    """An answer."""

    sunny: bool


assert [model.id for model in CLIENT.models.list()] == [MODEL]

chat = {"model": MODEL, "messages": MESSAGES, "temperature": 0}
assert CLIENT.chat.completions.create(**chat, max_completion_tokens=8).choices[0].message.content
stream = CLIENT.chat.completions.create(**chat, max_tokens=8, stream=True, stream_options={"include_usage": True})
assert list(stream)[-1].usage.completion_tokens
tools = [{"type": "function", "function": FUNCTION}]
call = {"type": "function", "function": {"name": "get_weather"}}
called = CLIENT.chat.completions.create(**chat, tools=tools, tool_choice=call).choices[0]
assert called.message.tool_calls[0].function.name == "get_weather"
answered = CLIENT.chat.completions.create(
    model=MODEL,
    messages=[
        *MESSAGES,
        called.message,
        *({"role": "tool", "tool_call_id": one.id, "content": "sunny"} for one in called.message.tool_calls),
    ],
    tools=tools,
    max_tokens=8,
)
assert answered.usage.completion_tokens
parsed = CLIENT.chat.completions.parse(**chat, response_format=Answer, max_tokens=60)
assert isinstance(parsed.choices[0].message.parsed, Answer)

first = CLIENT.responses.create(model=MODEL, input="Name a city.", max_output_tokens=8)
assert first.output_text
assert CLIENT.responses.create(model=MODEL, input="Another.", previous_response_id=first.id, max_output_tokens=8).output
talk = [{"role": "user", "content": "Name a city."}, {"role": "assistant", "content": "Oslo."}]
short = CLIENT.responses.compact(model=MODEL, input=talk, extra_body={"max_output_tokens": 20})
assert [item.type for item in short.output] == ["message", "compaction"]
items = [item.to_dict(warnings=False) for item in short.output]
assert CLIENT.responses.create(model=MODEL, input=items, max_output_tokens=8).output_text
events = [event.type for event in CLIENT.responses.create(model=MODEL, input="Hi", max_output_tokens=4, stream=True)]
assert events[0] == "response.created"
output = CLIENT.responses.parse(model=MODEL, input="Sunny?", text_format=Answer, max_output_tokens=60, temperature=0)
assert isinstance(output.output_parsed, Answer)

assert CLIENT.embeddings.create(model=MODEL, input="a city").data[0].embedding

try:
    CLIENT.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello " * 9000}])
except openai.BadRequestError as error:
    assert error.code == "context_length_exceeded"
else:
    raise AssertionError("the context overflowed without an error")
