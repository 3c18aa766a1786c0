"""Fields of requests without implementation: accepted and named, refused with a remedy, or unknown."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway

from kvferry.core.errors import InvalidRequest
from kvferry.gateway.decide.config import HttpConfig
from kvferry.gateway.http.fields.field_policy import Effect, FieldRule
from kvferry.gateway.http.fields.strict import MAX_FIELDS, MAX_IGNORED, Strict, effects, kept_fields
from kvferry.gateway.http.messages.body import MessageRequest
from kvferry.gateway.http.openai.schema import ChatRequest
from kvferry.gateway.http.openapi.operations import OPERATIONS

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = {"role": "user", "content": "hi"}
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HI], "max_tokens": 2, "seed": 1},
    TEXT: {"prompt": "hi", "max_tokens": 2, "seed": 1},
    RESPONSES: {"input": "hi", "max_output_tokens": 2, "seed": 1},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}
HINTS = {
    "safety_identifier": "user-1",
    "service_tier": "flex",
    "request_id": "r-1",
    "kv_transfer_params": {"do_remote_decode": True},
    "vllm_xargs": {"a": 1},
}
ASSISTANT = {"role": "assistant", "content": "Hello."}


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway() as running:
        yield running


@pytest.fixture
async def client(gateway: ScriptedGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as opened:
        yield opened


def ignored(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    header = response.headers.get("kvferry-ignored")
    return [] if header is None else header.split(", ")


def output(response: httpx.Response) -> Any:
    body = response.json()
    return body["choices"] if "choices" in body else body["output"][0]["content"]


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
async def test_hints_are_named_and_change_no_answer(client, path):
    plain = await client.post(path, json=GOOD[path])
    hinted = await client.post(path, json={**GOOD[path], **HINTS})
    assert output(plain) == output(hinted)
    assert ignored(plain) == []
    assert ignored(hinted) == list(HINTS)


@pytest.mark.parametrize("path", GOOD)
async def test_unknown_fields_have_no_effect_and_are_named(client, path):
    assert ignored(await client.post(path, json={**GOOD[path], "no_such_field": {"a": [1]}})) == ["no_such_field"]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"metadata": {"trace": "a"}, "store": True, "verbosity": "low", "user": "u"}, "metadata store verbosity user"),
        ({"metadata": None, "store": False, "verbosity": "medium", "service_tier": "auto", "user": None}, ""),
        ({"functions": [], "function_call": "none", "modalities": ["text"], "thinking_token_budget": None}, ""),
        ({"prediction": {"type": "content", "content": "x"}, "stream_interval": 5}, "prediction stream_interval"),
        ({"messages": [{**HI, "id": "m1"}, {**HI, "id": "m2"}]}, "messages.id"),
        ({"messages": [HI, {**ASSISTANT, "annotations": [], "audio": None, "function_call": None}]}, ""),
        ({"messages": [HI, {**ASSISTANT, "annotations": [{"type": "url_citation"}]}]}, "messages.annotations"),
        ({"messages": [{**HI, "content": [{"type": "text", "text": "a", "id": "p1"}]}]}, "messages.content.id"),
        ({"response_format": {"type": "text", "x": 1}, "chat_template_kwargs": {"y": 1}}, "response_format.x"),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning.summary"),
    ],
)
async def test_fields_without_effect_are_named_by_their_paths(client, fields, names):
    assert ignored(await client.post(CHAT, json={**GOOD[CHAT], **fields})) == names.split()


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
async def test_streams_and_refused_requests_have_the_header(client, path):
    streamed = await client.post(
        path, json={**GOOD[path], "stream": True, "stream_options": {"include_obfuscation": True}}
    )
    assert ignored(streamed) == ["stream_options.include_obfuscation"]
    plain = await client.post(
        path, json={**GOOD[path], "stream": True, "stream_options": {"include_obfuscation": False}}
    )
    assert ignored(plain) == []


async def test_fields_are_counted_under_names_of_the_table_only(gateway, client):
    body = {**GOOD[CHAT], "messages": [{**HI, "id": "m"}], "safety_identifier": "k", "made_up": 1, "also_made_up": 2}
    for _ in range(2):
        await client.post(CHAT, json=body)
    text = (await client.get(f"{gateway.admin_url}/metrics")).text
    counted = [line for line in text.splitlines() if line.startswith("kvferry_gateway_ignored_fields_total{")]
    assert sorted(counted) == [
        'kvferry_gateway_ignored_fields_total{field="messages.id"} 2.0',
        'kvferry_gateway_ignored_fields_total{field="safety_identifier"} 2.0',
        'kvferry_gateway_ignored_fields_total{field="unknown"} 4.0',
    ]


async def test_names_in_the_header_are_safe_and_bounded(client):
    names = ["a\r\nset-cookie: x", "é, b", "k" * 200, *(f"n{number}" for number in range(40))]
    found = ignored(await client.post(CHAT, json={**GOOD[CHAT], **dict.fromkeys(names, 1)}))
    assert found[:3] == ["a??set-cookie??x", "???b", "k" * 64]


def test_names_are_bounded_and_schemas_are_no_objects_of_requests():
    many = {"messages": [{**HI, f"x{number}": 1} for number in range(200)]}
    kept, names = kept_fields(ChatRequest, many, is_strict=False)
    assert kept["messages"] == [HI] * 200
    assert names == tuple(f"messages.x{number}" for number in range(MAX_IGNORED))
    function = {"name": "f", "parameters": {"properties": {"id": {}}}}
    tool = {"type": "function", "id": "t", "function": {**function, "x": 1}}
    kept, names = kept_fields(ChatRequest, {"tools": [tool]}, is_strict=False)
    assert kept == {"tools": [{"type": "function", "function": function}]}
    assert names == ("tools.id", "tools.function.x")


async def test_a_strict_gateway_refuses_unknown_fields_at_their_place():
    http = HttpConfig(address="127.0.0.1:0", strict_fields=True)
    async with scripted_gateway(http=http) as strict, httpx.AsyncClient(base_url=strict.url) as client:
        for path, body in GOOD.items():
            refused = await client.post(path, json={**body, "temprature": 1})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "temprature"
            assert refused.json()["error"]["message"] == "temprature is an unknown field; leave it out"
        nested = await client.post(CHAT, json={"messages": [HI, {**HI, "x": 1}]})
        assert nested.json()["error"]["param"] == "messages.1.x"
        item = await client.post(RESPONSES, json={"input": [{**HI, "x": 1}]})
        assert item.json()["error"]["param"] == "input.0.x"
        assert ignored(await client.post(CHAT, json={**GOOD[CHAT], **HINTS})) == list(HINTS)


def test_objects_with_too_many_fields_are_refused():
    body = {"messages": [{**HI, "tool_calls": [{f"k{number}": 1 for number in range(MAX_FIELDS + 1)}]}]}
    with pytest.raises(InvalidRequest, match=r"messages\.0\.tool_calls\.0 has 65 fields; at most 64") as caught:
        kept_fields(ChatRequest, body, is_strict=False)
    assert caught.value.field == "messages.0.tool_calls.0"
    tool = {"type": "web_search", **{f"k{number}": 1 for number in range(MAX_FIELDS)}}
    with pytest.raises(InvalidRequest, match=r"tools\.0 has 65 fields; at most 64"):
        kept_fields(MessageRequest, {"tools": [tool]}, is_strict=False)


def all_kinds(kind: type[Strict] = Strict) -> set[type[Strict]]:
    return {kind}.union(*map(all_kinds, kind.__subclasses__()))


@pytest.mark.parametrize("kind", sorted(all_kinds(), key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_no_field_is_both_implemented_and_in_the_table(kind):
    assert not {info.alias or name for name, info in kind.model_fields.items()} & kind.RULES.keys()


def test_the_table_says_what_happens_to_each_field():
    found = effects(ChatRequest)
    assert found["temperature"] is found["messages.content"] is found["messages.tool_calls.function.name"]
    assert found["temperature"] is Effect.HONOURED
    assert found["messages.id"] == FieldRule()
    assert FieldRule("why").effect is Effect.REFUSED
    for op in OPERATIONS:
        for rule in [] if op.body is None else effects(op.body).values():
            assert isinstance(rule, Effect) or None in rule.neutral
