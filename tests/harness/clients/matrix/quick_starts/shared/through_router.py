"""What passes through a router in front of the gateway: chat, streams, calls, schemas, Responses, Messages, errors."""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import anthropic
import openai

_START_SECONDS = 60.0
_MESSAGES = [{"role": "user", "content": "Is it sunny in Paris?"}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
            "required": ["city"],
        },
    },
}
_SCHEMA = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}


@contextmanager
def router(words: Sequence[str], url: str, model: str) -> Iterator[str]:
    """Run a router in front of a gateway; yield its address.

    Args:
        words: the program, installed beside this Python, and its command.
        url: address of the gateway.
        model: the served model, which the router must list.
    """
    port = _free_port()
    program = str(Path(sys.executable).parent / words[0])
    options = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(_free_port())]
    with subprocess.Popen([program, *words[1:], *options, "--worker-urls", url]) as process:
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not _lists(f"http://127.0.0.1:{port}", model):
                assert time.monotonic() < deadline, "the router does not start"
                assert process.poll() is None, "the router ended"
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def passes(url: str, model: str) -> None:
    """Check that requests and answers pass through the router at `url` unchanged."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chat = {"model": model, "messages": _MESSAGES, "temperature": 0}
    whole = client.chat.completions.create(**chat, max_tokens=8)
    again = client.chat.completions.create(**chat, max_tokens=8)
    assert again.choices[0].message.content == whole.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens
    stream = client.chat.completions.create(**chat, max_tokens=8, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[-1].usage.completion_tokens
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    called = client.chat.completions.create(**chat, tools=[_TOOL], tool_choice="required", max_tokens=60)
    assert called.choices[0].message.tool_calls[0].function.name == "get_weather"
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}}
    assert (
        '"sunny"'
        in client.chat.completions.create(**chat, response_format=form, max_tokens=60).choices[0].message.content
    )
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    chosen = client.chat.completions.create(**chat, max_tokens=8, extra_body=extra)
    assert chosen.choices[0].message.content in ("yes", "no")
    assert client.completions.create(model=model, prompt="Oslo is", max_tokens=4).choices[0].text

    assert client.responses.create(model=model, input="Name a city.", max_output_tokens=8).output_text
    events = [one.type for one in client.responses.create(model=model, input="Hi", max_output_tokens=4, stream=True)]
    assert (events[0], events[-1]) == ("response.created", "response.incomplete")
    assert client.embeddings.create(model=model, input="a city").data[0].embedding

    claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    assert claude.messages.create(model=model, messages=_MESSAGES, max_tokens=8).content[0].text
    with claude.messages.stream(model=model, messages=_MESSAGES, max_tokens=8) as events:
        assert events.get_final_text()

    for messages, code in (([{"role": "user", "content": "hello " * 9000}], "context_length_exceeded"),):
        try:
            client.chat.completions.create(model=model, messages=messages)
        except openai.BadRequestError as error:
            assert error.code == code
        else:
            raise AssertionError(f"no error {code}")


def _lists(url: str, model: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            return model.encode() in answer.read()
    except OSError:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
