"""Instructor: an object by functions, by a schema and by the Responses API."""

import sys

import instructor
import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class Answer(BaseModel):
    """An answer."""

    sunny: bool


for mode in (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.RESPONSES_TOOLS,
):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode)
    messages = [{"role": "user", "content": "Is it sunny?"}]
    answer = client.create(model=MODEL, response_model=Answer, messages=messages, max_tokens=100, temperature=0)
    assert isinstance(answer, Answer)
