"""A prompt that is too long is refused in words that clients of either API recognize, whichever route it takes."""

import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio
from harness.fakes.scripted_gateway import scripted_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 512
"""Context length of the scripted workers, in tokens."""
LONG = "x" * CONTEXT
"""A token for each character."""
LONGER = "x" * (64 * CONTEXT + 640)
"""Too long to be tokenized."""
BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with scripted_gateway() as running, httpx.AsyncClient(base_url=running.url, timeout=60) as opened:
        yield opened


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [LONG, LONGER], ids=["long", "longer"])
@pytest.mark.parametrize("path", BODIES)
async def test_words_and_code(client: httpx.AsyncClient, path: str, text: str, stream: bool) -> None:
    answer = await client.post(path, json=BODIES[path](text) | {"model": "bytes", "stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error.get("code") or error["details"]["error_code"]) == "context_length_exceeded"
    assert error["type"] == "invalid_request_error"
    if "param" in error:
        fields = {"/v1/chat/completions": "messages", "/v1/responses": "input", "/v1/completions": "prompt"}
        assert error["param"] == fields[path]
        assert f"; shorten the {fields[path]} by at least " in error["message"]
    # Agents parse the first words, which are Anthropic's; the others are OpenAI's.
    assert re.match(
        rf"prompt is too long: \d+ tokens > {CONTEXT - 1} maximum; "
        rf"this model's maximum context length is {CONTEXT} tokens, prompt and output; ",
        error["message"],
    )
