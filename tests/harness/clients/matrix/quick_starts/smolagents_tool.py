"""Smolagents: text, a call, a stream, and an agent; the small model seldom solves a task in two steps."""

import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

URL, MODEL = sys.argv[1:]


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: name of the city.
    """
    return f"sunny in {city}"


model = OpenAIServerModel(model_id=MODEL, api_base=f"{URL}/v1", api_key="none", max_tokens=120, temperature=0)
question = [{"role": "user", "content": [{"type": "text", "text": "Is it sunny in Paris?"}]}]
assert model.generate(question).content
assert list(model.generate_stream(question))
assert model.generate(question, tools_to_call_from=[get_weather]).tool_calls[0].function.name == "get_weather"
agent = ToolCallingAgent(tools=[get_weather], model=model, max_steps=2, verbosity_level=0)
assert agent.run("Is it sunny in Paris?")
