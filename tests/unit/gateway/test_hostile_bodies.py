"""Large and hostile bodies over real sockets: refused by name, without blocking the event loop."""

import gc
import json
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import pytest_asyncio
from harness.fakes.byte_model import byte_model
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway
from harness.loop_lag import watch_lag

from kvferry.core.clock import SystemClock
from kvferry.serving.text_process import TextLimits, TextProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_GOOD = {"prompt": "hi", "max_tokens": 2}
_MAX_LAG_SECONDS = 0.25
"""Processor time, which does not depend on other processes; far below the seconds that each of these bodies took on the
event loop."""

_MAX_BUSY_SECONDS = 0.45
"""Three times the lag of the largest answer, with the client and the workers on the same loop; encoded in one piece,
the answer takes 0.66 s.
"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway() -> AsyncIterator[ScriptedGateway]:
    process = TextProcess(byte_model, TextLimits(job_seconds=20.0))
    async with scripted_gateway(text_process=process) as opened:
        await process.run("", 0, len_of, b"")  # The checking process is started first, so its start is not measured.
        yield opened


def len_of(_model: object, body: bytes) -> int:
    return len(body)


def chat(content: str) -> str:
    return f'{{"messages": [{{"role": "user", "content": {content}}}]}}'


HOSTILE = {
    "numbers, wrong at the last": (_TEXT, '{"prompt": [' + "1," * 2_000_000 + "null]}", "prompt.2000000"),
    "numbers": (_TEXT, '{"prompt": [' + "1," * 2_000_000 + "1]}", "prompt"),
    "a long number": (_TEXT, '{"prompt": [' + "1" * 4_000_000 + "]}", None),
    "lists": (_TEXT, '{"prompt": [' + "[]," * 1_000_000 + "1]}", "prompt"),
    "texts": (_TEXT, '{"prompt": [' + '"",' * 1_000_000 + "1]}", "prompt"),
    "digits": (_TEXT, '{"prompt": "' + "1" * 8_000_000 + '"}', "prompt"),
    "spaces": (_TEXT, '{"prompt": "' + " " * 8_000_000 + '"}', "prompt"),
    "empty messages": (_CHAT, '{"messages": [' + '{"role": "user", "content": ""},' * 190_000 + "{}]}", "messages"),
    "empty parts": (_CHAT, chat("[" + '{"type": "text", "text": ""},' * 200_000 + "1]"), "messages.0.content"),
    "a long message": (_CHAT, chat('"' + "1" * 8_000_000 + '"'), "messages"),
    "unknown fields": (_CHAT, json.dumps({f"k{i}": i for i in range(400_000)}), None),
    "one long field": (_TEXT, '{"prompt": "hi", "' + "k" * 8_000_000 + '": 1}', "k" * 39 + "…"),
    "biases": (_TEXT, json.dumps({**_GOOD, "logit_bias": {str(i): 1 for i in range(400_000)}}), "logit_bias"),
    "stops": (_TEXT, json.dumps({**_GOOD, "stop": ["x"] * 1_000_000}), "stop"),
    "depth": (_TEXT, '{"prompt": ' + "[" * 1_000_000 + "]" * 1_000_000 + "}", None),
    "just small enough to be read here": (_TEXT, '{"prompt": [' + "1," * 8_000 + "null]}", "prompt.8000"),
}


@pytest.mark.parametrize(("path", "body", "param"), HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_body_is_refused_and_stops_no_other_request(gateway, path, body, param):
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        async with watch_lag(SystemClock()) as lag:
            refused = await client.post(path, content=body.encode(), headers={"content-type": "application/json"})
        assert refused.status_code == 400, refused.text[:300]
        error = refused.json()["error"]
        assert error["param"] == param
        assert len(error["message"]) < 400
        assert lag.process_seconds < _MAX_LAG_SECONDS
        answered = await client.post(_TEXT, json=_GOOD)
        assert answered.status_code == 200


async def test_a_large_request_that_is_valid_is_served(gateway):
    """A large request gives the same tokens whether the event loop or another process reads it."""
    padding = {"metadata": None, "user": "u" * 20_000}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        small, large = [await client.post(_TEXT, json={**_GOOD, "seed": 1, **extra}) for extra in ({}, padding)]
    assert small.json()["choices"] == large.json()["choices"]


async def test_samples_of_one_request_are_bounded(gateway):
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        refused = await client.post(_TEXT, json={"prompt": ["a"] * 16, "n": 64, "max_tokens": 1})
        assert refused.status_code == 400
        assert "16 prompts with n=64 need 1024 samples; at most 128" in refused.json()["error"]["message"]
        answered = await client.post(_TEXT, json={"prompt": ["a"] * 2, "n": 64, "max_tokens": 1})
        assert [choice["index"] for choice in answered.json()["choices"]] == list(range(128))


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: after thousands of other tests in this process, a collection takes half a second."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("path", [_TEXT, _CHAT])
async def test_a_large_answer_stops_no_other_request(gateway, path):
    """The answer has 128 samples with 20 log-probabilities for each token: up to 6 MB of JSON."""
    body_fields = {"max_tokens": 100, "n": 64}
    if path == _TEXT:
        body_fields |= {"prompt": ["a"] * 2, "logprobs": 5}
    else:
        body_fields |= {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
    async with (
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as client,
        watch_lag(SystemClock()) as lag,
        client.stream("POST", path, json=body_fields) as answered,
    ):
        assert answered.status_code == 200, await answered.aread()
        size = sum([len(part) async for part in answered.aiter_bytes()])
    assert size > 500_000
    assert lag.busy_seconds < _MAX_BUSY_SECONDS
