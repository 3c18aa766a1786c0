"""OpenAI's Agents SDK: a function is called, and the answer is parsed, over both APIs."""

import asyncio
import sys

import agents
import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
CALLS = []


class Answer(BaseModel):
    """An answer."""

    sunny: bool


@agents.function_tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    CALLS.append(city)
    return "sunny"


async def main() -> None:
    """Run an agent that must call its function once, and another one that may; the small model often does not."""
    agents.set_default_openai_client(
        openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), use_for_tracing=False
    )
    agents.set_tracing_disabled(True)
    for api in ("responses", "chat_completions"):
        agents.set_default_openai_api(api)
        CALLS.clear()
        for choice, output in (("required", None), ("none", Answer)):
            settings = agents.ModelSettings(
                max_tokens=200, temperature=0, tool_choice=choice, parallel_tool_calls=False
            )
            agent = agents.Agent(
                name="weather", model=MODEL, tools=[get_weather], output_type=output, model_settings=settings
            )
            result = await agents.Runner.run(agent, "Is it sunny in Paris?", max_turns=4)
            assert isinstance(result.final_output, output or str)
        assert CALLS, "the function was not called"
        # With an output type and a free choice the request is accepted; the model may call until the turns end.
        free = agents.Agent(name="weather", model=MODEL, tools=[get_weather], output_type=Answer)
        settings = agents.RunConfig(
            model_settings=agents.ModelSettings(max_tokens=200, parallel_tool_calls=False, temperature=0)
        )
        try:
            streamed = agents.Runner.run_streamed(free, "Is it sunny in Paris?", max_turns=2, run_config=settings)
            assert [event async for event in streamed.stream_events()]
        except agents.MaxTurnsExceeded:
            pass


asyncio.run(main())
