"""`chat_template_kwargs` over HTTP, gRPC and in pins: variables of the chat template."""

import json
from typing import Any

import httpx
import pytest
from harness.fakes.byte_model import byte_model
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway

from kvferry.client import AsyncClient
from kvferry.core.errors import InvalidRequest
from kvferry.gateway.http.encoding.pin_bodies import read_prefix
from kvferry.gateway.http.encoding.token_ids import read_tokenize

MESSAGES = [{"role": "user", "content": "hi"}]
VARIABLES = {"enable_thinking": False}
TEXT = f"<user>hi{json.dumps(VARIABLES)}<assistant>"


@pytest.fixture
async def gateway() -> Any:
    async with scripted_gateway() as running:
        yield running


def test_conversations_to_tokenize_and_to_pin_have_variables() -> None:
    body = {"messages": MESSAGES, "chat_template_kwargs": VARIABLES}
    ids, *_ = read_tokenize(byte_model(), json.dumps(body).encode())
    assert bytes(ids).decode() == TEXT
    pinned, _ = read_prefix(byte_model(), json.dumps(body).encode(), has_ttl=False)
    assert pinned == ids


@pytest.mark.parametrize("read", [read_tokenize, lambda model, body: read_prefix(model, body, has_ttl=False)])
def test_text_has_no_variables(read: Any) -> None:
    with pytest.raises(InvalidRequest, match="chat_template_kwargs cannot be used with prompt") as caught:
        read(byte_model(), json.dumps({"prompt": "x", "chat_template_kwargs": VARIABLES}).encode())
    assert caught.value.field == "chat_template_kwargs"


async def test_a_chat_over_http_has_variables(gateway: ScriptedGateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for fields, usage in (({}, "<user>hi<assistant>"), ({"chat_template_kwargs": VARIABLES}, TEXT)):
            body = {"messages": MESSAGES, "max_tokens": 2, **fields}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.json()["usage"]["prompt_tokens"] == len(usage), answer.text
        wrong = await client.post("/v1/chat/completions", json={"messages": MESSAGES, "chat_template_kwargs": [1]})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "chat_template_kwargs"


async def test_a_chat_over_grpc_has_variables(gateway: ScriptedGateway) -> None:
    async with AsyncClient(gateway.gateway.listening.grpc) as client:
        (answer,) = await client.complete(MESSAGES, chat_template_kwargs=VARIABLES)
        assert answer.usage.prompt_tokens == len(TEXT)
        with pytest.raises(InvalidRequest, match="chat_template_kwargs needs a conversation"):
            await client.complete("hi", chat_template_kwargs=VARIABLES)
        with pytest.raises(InvalidRequest, match="values as in JSON"):
            await client.complete(MESSAGES, chat_template_kwargs={"a": object()})
