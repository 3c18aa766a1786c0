"""LangChain: named agents with a tool, structured output, and the overflow of the context, over three APIs."""

import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class Answer(BaseModel):
    """An answer."""

    sunny: bool


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


COMMON = {"model": MODEL, "api_key": "none", "max_tokens": 60, "temperature": 0, "max_retries": 0}
MODELS = (
    ChatOpenAI(base_url=f"{URL}/v1", **COMMON),
    ChatOpenAI(base_url=f"{URL}/v1", use_responses_api=True, **COMMON),
    ChatAnthropic(base_url=URL, **COMMON),
)
for model in MODELS:
    assert model.invoke("Name a city.").text
    assert list(model.stream("Name a city."))
    agent = create_agent(model, [get_weather], name="weather", system_prompt="Be brief.")
    turns = agent.invoke({"messages": [{"role": "user", "content": "Is it sunny in Paris?", "name": "ann"}]})
    assert agent.invoke({"messages": [*turns["messages"], ("user", "And in Oslo?")]})["messages"][-1].text
    assert isinstance(model.with_structured_output(Answer).invoke("Is it sunny?"), Answer)
    assert isinstance(model.with_structured_output(Answer, method="function_calling").invoke("Is it sunny?"), Answer)
    try:
        model.invoke("hello " * 9000)
    except ContextOverflowError:
        continue
    raise AssertionError(f"{type(model).__name__}: the context overflowed without its error")

# Without `check_embedding_ctx_length` the text is sent, and not the ids of OpenAI's vocabulary.
embeddings = OpenAIEmbeddings(model=MODEL, base_url=f"{URL}/v1", api_key="none", check_embedding_ctx_length=False)
assert embeddings.embed_query("a city")
