"""LlamaIndex: chat, streams, structured outputs, an agent with a tool, embeddings."""

import asyncio
import sys
from typing import Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
OPTIONS = {
    "model": MODEL,
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "is_chat_model": True,
    "is_function_calling_model": True,
    "context_window": 8192,
    "max_retries": 0,
    "temperature": 0,
}


class Answer(BaseModel):
    """An answer."""

    sunny: bool


def get_weather(city: Literal["Paris", "Oslo"]) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


llm = OpenAILike(**OPTIONS, max_tokens=16)
question = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Is it sunny?")]
assert llm.chat(question).message.content
assert "".join(part.delta or "" for part in llm.stream_chat(question)) == llm.chat(question).message.content
assert llm.complete("Oslo is").text

tool = FunctionTool.from_defaults(get_weather)
longer = OpenAILike(**OPTIONS, max_tokens=60, should_use_structured_outputs=True)
called = longer.chat_with_tools([tool], user_msg="Is it sunny in Paris?", tool_required=True)
call = longer.get_tool_calls_from_response(called)[0]
assert call.tool_name == "get_weather"
assert call.tool_kwargs["city"] in ("Paris", "Oslo")
assert isinstance(longer.structured_predict(Answer, PromptTemplate("Is it sunny?")), Answer)


async def run_agent() -> None:
    """Let an agent answer; it may call its tool first."""
    agent = FunctionAgent(tools=[tool], llm=llm, system_prompt="Be brief.")
    assert str(await agent.run("Name a city.", max_iterations=3)) is not None


asyncio.run(run_agent())

embedding = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{URL}/v1", api_key="none")
assert embedding.get_text_embedding("a city")
