"""Bodies of POST /pin_prefix and /unpin_prefix: text, token ids, conversations, and refusals by field."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from harness.fakes.byte_model import byte_model
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway

from kvferry.core.errors import InvalidRequest
from kvferry.gateway.http.encoding.pin_bodies import read_prefix
from kvferry.serving import prompts

MODEL = replace(byte_model(), max_model_tokens=4096)
SYSTEM = {"role": "system", "content": "You are brief."}
USER = {"role": "user", "content": "Hi"}


def ids_of(**fields: object) -> list[int]:
    return read_prefix(MODEL, json.dumps({"ttl_seconds": 1, **fields}).encode(), has_ttl=True)[0]


def test_text_and_token_ids_are_those_of_a_completion() -> None:
    assert ids_of(prompt="abc") == [257, 97, 98, 99]
    assert ids_of(prompt=[5, 6]) == [5, 6]


def test_a_conversation_without_a_question_is_pinned_up_to_where_conversations_differ() -> None:
    model = byte_model()
    prefix = ids_of(messages=[SYSTEM])
    for content in ("Hello", "zzz", "1"):
        whole = prompts.encode_chat(model, [SYSTEM, {"role": "user", "content": content}])
        assert whole[: len(prefix)] == prefix
    assert len(prefix) > len(SYSTEM["content"])
    answered = [SYSTEM, USER, {"role": "assistant", "content": "Hello"}]
    longer = ids_of(messages=answered)
    whole = prompts.encode_chat(model, [*answered, {"role": "user", "content": "again"}])
    assert whole[: len(longer)] == longer
    assert len(longer) > len(prefix)


def test_a_conversation_with_a_question_is_pinned_whole() -> None:
    assert ids_of(messages=[SYSTEM, USER]) == prompts.encode_chat(byte_model(), [SYSTEM, USER])


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def test_tools_are_part_of_the_prefix() -> None:
    assert b'"name": "f"' in bytes(i for i in ids_of(messages=[SYSTEM], tools=[TOOL]) if i < 256)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({}, "prompt", "must have either prompt or messages, not neither"),
        ({"prompt": "a", "messages": [USER]}, "prompt", "must have either prompt or messages, not both"),
        ({"prompt": "a", "tools": []}, "tools", "tools cannot be used with prompt"),
        ({"prompt": 5}, "prompt", "must be a string or a list of token ids, not 5"),
        ({"prompt": [1, True]}, "prompt", "must be a string or a list of token ids"),
        ({"prompt": [1, "a"]}, "prompt", "must be a string or a list of token ids"),
        ({"prompt": [-1]}, "prompt", "token id -1"),
        ({"prompt": [258]}, "prompt", "token id 258"),
        ({"prompt": [1 << 80]}, "prompt", "of more than 64 bits"),
        ({"prompt": [1] * 100_000}, "prompt", "100000 tokens >"),
        ({"prompt": "a" * 1_000_000}, "prompt", "1000000 characters"),
        ({"messages": []}, "messages", "messages is empty"),
        ({"messages": "a"}, "messages", "messages"),
        ({"messages": [{"role": "judge", "content": "a"}]}, "messages.0.role", "role"),
        ({"prompt": "a", "ttl_seconds": 0}, "ttl_seconds", "greater than 0"),
        ({"prompt": "a", "ttl_seconds": -1}, "ttl_seconds", "greater than 0"),
        ({"prompt": "a", "ttl_seconds": 604801}, "ttl_seconds", "less than or equal to 604800"),
        ({"prompt": "a", "ttl_seconds": "60"}, "ttl_seconds", "valid number"),
        ({"prompt": "a", "ttl_seconds": True}, "ttl_seconds", "valid number"),
        ({"prompt": "a", "ttl_seconds": None}, "ttl_seconds", "valid number"),
        ({"prompt": "a", "tenant": "t" * 257}, "tenant", "has 257 characters; at most 256"),
        ({"prompt": "a", "tenant": 5}, "tenant", "valid string"),
        ({"prompt": "a", "cache_salt": "s" * 1025}, "cache_salt", "has 1025 characters; at most 1024"),
        ({"prompt": "a", "model": 5}, "model", "valid string"),
        ({"prompt": "a", "max_tokens": 5}, "max_tokens", "unknown field"),
    ],
)
def test_an_invalid_field_is_named(fields: dict[str, object], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        ids_of(**fields)
    assert caught.value.field == field


def test_a_pin_needs_a_time_to_live_and_an_unpin_has_none() -> None:
    with pytest.raises(InvalidRequest, match="ttl_seconds is missing"):
        read_prefix(byte_model(), b'{"prompt": "a"}', has_ttl=True)
    with pytest.raises(InvalidRequest, match="ttl_seconds is an unknown field"):
        read_prefix(byte_model(), b'{"prompt": "a", "ttl_seconds": 1}', has_ttl=False)
    ids, fields = read_prefix(byte_model(), b'{"prompt": "a", "model": "m"}', has_ttl=False)
    assert (ids, fields.model, fields.prompt) == ([257, 97], "m", None)


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway() as running:
        yield running


async def test_the_routes_are_on_the_admin_port_only_and_take_json_only(gateway: ScriptedGateway) -> None:
    async with httpx.AsyncClient(timeout=20) as client:
        for path in ("/pin_prefix", "/unpin_prefix"):
            assert (await client.post(gateway.url + path, json={"prompt": "a", "ttl_seconds": 1})).status_code == 404
            assert (await client.get(gateway.admin_url + path)).status_code == 404
            form = await client.post(gateway.admin_url + path, data={"prompt": "a"})
            assert form.status_code == 415
            assert (await client.post(gateway.admin_url + path, json=[1])).status_code == 400
        assert (await client.get(gateway.url + "/pins")).status_code == 404
        assert (await client.get(gateway.admin_url + "/pins")).json()["pins"] == []
        large = {"prompt": "a" * (9 << 20), "ttl_seconds": 1}
        assert (await client.post(gateway.admin_url + "/pin_prefix", json=large)).status_code == 413
