"""Pydantic AI: text, typed outputs, and the overflow of the context, over three APIs."""

import sys

from pydantic import BaseModel
from pydantic_ai import Agent, ModelContextWindowExceededError, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1:]
SETTINGS = {"max_tokens": 120, "temperature": 0, "parallel_tool_calls": False}


class Answer(BaseModel):
    """An answer."""

    sunny: bool


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


OPENAI = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
ANTHROPIC = AnthropicProvider(base_url=URL, api_key="none")
MODELS = (
    (OpenAIChatModel(MODEL, provider=OPENAI), (Answer, NativeOutput(Answer))),
    (OpenAIResponsesModel(MODEL, provider=OPENAI), (Answer, NativeOutput(Answer))),
    (AnthropicModel(MODEL, provider=ANTHROPIC), (Answer,)),
)
for model, outputs in MODELS:
    assert Agent(model, tools=[get_weather], model_settings=SETTINGS).run_sync("Is it sunny in Paris?").output
    for output in outputs:
        agent = Agent(model, output_type=output, model_settings=SETTINGS)
        assert isinstance(agent.run_sync("Is it sunny?").output, Answer)
    try:
        Agent(model).run_sync("hello " * 9000)
    except ModelContextWindowExceededError:
        continue
    raise AssertionError(f"{model.system}: the context overflowed without its error")
