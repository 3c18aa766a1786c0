"""The OpenAPI document describes each route, field, answer and error, and real answers match it."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from harness.fakes.scripted_gateway import scripted_gateway
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from kvferry.core import errors
from kvferry.core.sampling import RANGES, SamplingParams
from kvferry.gateway.decide.config import BatchConfig
from kvferry.gateway.http.body_route import BodyTooLarge, BodyTooSlow, UnsupportedMedia
from kvferry.gateway.http.fields.field_policy import Effect
from kvferry.gateway.http.fields.strict import Strict
from kvferry.gateway.http.openapi.document import openapi_document
from kvferry.gateway.http.openapi.operations import OPERATIONS

DOCUMENT = openapi_document("1.0", needs_key=False)
SCHEMAS = DOCUMENT["components"]["schemas"]
VALID: dict[str, dict[str, Any]] = {
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "logprobs": True},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": "hi", "instructions": "Be kind."},
    "/v1/responses/compact": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}], "system": "Be kind."},
    "/v1/completions": {"prompt": "abc", "max_tokens": 4, "echo": True, "logprobs": 2, "n": 2},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v1/score": {"text_1": "a", "text_2": ["b", "c"]},
    "/v1/rerank": {"query": "a", "documents": ["b", {"text": "c"}]},
    "/tokenize": {"prompt": "abc", "return_token_strs": True},
    "/detokenize": {"tokens": [97, 98]},
}

FILES = ("/v1/files", "/v1/batches")
"""Routes whose examples depend on each other; see `test_files_and_batches_are_as_described`."""


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    batches = BatchConfig(tmp_path / "batches")
    async with scripted_gateway(batches=batches) as gateway, httpx.AsyncClient(base_url=gateway.url) as opened:
        opened.gateway = gateway  # type: ignore[attr-defined]
        yield opened


def validator(schema: Any) -> Draft202012Validator:
    return Draft202012Validator({"allOf": [schema], "components": DOCUMENT["components"]})


def walk(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(item)


def test_generators_of_clients_can_read_each_schema():
    """oapi-codegen 2.8 ends at `"items": false`, which JSON Schema has for tuples."""
    found = list(walk(DOCUMENT))
    assert not [part for part in found if "prefixItems" in part]
    assert not [part for part in found if isinstance(part.get("items", {}), bool)]
    runs = SCHEMAS["ChatChoice"]["properties"]["weight_versions"]["items"]
    assert runs["items"] == {"anyOf": [{"type": "string"}, {"type": "integer"}]}
    assert (runs["minItems"], runs["maxItems"]) == (2, 2)


async def test_each_route_of_the_server_is_described_and_each_described_route_is_served(client):
    served = {
        (re.sub(r":path}", "}", route.path), method.lower())
        for route in client.gateway.gateway.client_api.routes()
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert served == {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}
    names = [op.name for op in OPERATIONS]
    assert len(names) == len(set(names))
    for path, body in VALID.items():
        assert (await client.post(path, json=body)).status_code == 200, path
    elsewhere = ("/score", "/rerank", *FILES)
    assert VALID.keys() >= {op.path for op in OPERATIONS if op.body and not op.path.startswith(elsewhere)}


@pytest.mark.parametrize("body", list(dict.fromkeys(op.body for op in OPERATIONS if op.body)), ids=lambda b: b.__name__)
def test_each_field_of_a_body_is_described_with_the_values_that_are_accepted(body):
    check_described(body, SCHEMAS[body.__name__])


def check_described(kind: type[Strict], described: dict[str, Any]) -> None:
    """Check that a schema has the fields of a class, honoured or not, and accepts others."""
    properties = described["properties"]
    assert properties.keys() == {info.alias or name for name, info in kind.model_fields.items()} | kind.RULES.keys()
    assert "additionalProperties" not in described
    for name, rule in kind.RULES.items():
        if rule.effect is Effect.REFUSED:
            assert properties[name] == {"enum": list(rule.neutral), "description": f"Not supported: {rule.reason}."}
        else:
            assert properties[name] == {"description": "Accepted without effect."}


def test_each_part_of_a_body_is_described():
    parts = [kind for kind in all_subclasses(Strict) if f"{kind.__name__}Param" in SCHEMAS]
    assert len(parts) > 10
    for part in parts:
        check_described(part, SCHEMAS[f"{part.__name__}Param"])


def all_subclasses(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from all_subclasses(inner)


def test_each_field_of_an_answer_is_described():
    found = 0
    for op in OPERATIONS:
        for kind in (op.answer, op.event):
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                assert SCHEMAS[kind.__name__]["properties"].keys() == set(kind.__struct_encode_fields__)
                found += 1
    assert found >= 6


def test_ranges_of_numbers_are_those_of_the_sampling_parameters():
    for body in ("ChatRequest", "CompletionRequest"):
        for name, limits in RANGES.items():
            described = SCHEMAS[body]["properties"][name]
            kinds = [kind for kind in described.get("anyOf", [described]) if kind["type"] in ("integer", "number")]
            for kind in kinds:
                low = kind.get("minimum", kind.get("exclusiveMinimum"))
                assert (kind["maximum"], low) == (
                    limits.high,
                    0 if body[1] == "o" and name == "max_tokens" else limits.low,
                )
    for name, limits in RANGES.items():
        with pytest.raises(errors.InvalidRequest, match=name):
            SamplingParams(**{name: limits.high + 1})


def test_schemas_are_valid_and_their_references_exist():
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)
    for item in walk(DOCUMENT):
        reference = item.get("$ref")
        if isinstance(reference, str):
            assert reference.removeprefix("#/components/schemas/") in SCHEMAS


def test_each_error_of_a_route_is_described_with_its_code():
    for op in OPERATIONS:
        described = DOCUMENT["paths"][op.path.replace(":path", "")][op.method.lower()]["responses"]
        for kind in op.errors:
            answer = described[str(kind.http_status)]
            assert f"`{kind.reason.lower()}`" in answer["description"]
            assert answer["content"]["application/json"]["schema"]["$ref"].endswith(f"/{op.failure.__name__}")
        for status in (408, 431, 501):
            assert str(status) in described
    computed = next(op for op in OPERATIONS if op.path == "/v1/chat/completions")
    never_sent = {errors.RequestCancelled, errors.TicketRejected, errors.ModelFileError, errors.UsageError}
    sent = {BodyTooLarge, BodyTooSlow, UnsupportedMedia, *errors.KvferryError.__subclasses__()} - never_sent
    assert {kind.http_status for kind in computed.errors} == {kind.http_status for kind in sent}


@pytest.mark.parametrize("path", VALID)
async def test_answers_are_as_described(client, path):
    described = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
    answer = await client.post(path, json=VALID[path])
    validator(described["application/json"]["schema"]).validate(answer.json())
    if "text/event-stream" not in described:
        return
    streamed = await client.post(path, json={**VALID[path], "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: ")]
    data = described["text/event-stream"]["schema"]["properties"]["data"]
    if path not in ("/v1/responses", "/v1/messages"):
        assert events.pop() == data["anyOf"][0]["const"] == "[DONE]"
        data = data["anyOf"][1]
    assert data["contentMediaType"] == "application/json"
    for event in events:
        validator(data["contentSchema"]).validate(json.loads(event))


async def test_files_and_batches_are_as_described(client):
    async def check(method: str, path: str, url: str, **sent: Any) -> Any:
        answer = await client.request(method, url, **sent)
        described = DOCUMENT["paths"][path][method.lower()]["responses"][str(answer.status_code)]
        (kind,) = described["content"]
        assert answer.headers["content-type"] == kind
        if kind == "application/json":
            validator(described["content"][kind]["schema"]).validate(answer.json())
            return answer.json()
        return None

    form = DOCUMENT["paths"]["/v1/files"]["post"]["requestBody"]["content"]
    assert form == {"multipart/form-data": {"schema": {"$ref": "#/components/schemas/FileUpload"}}}
    file = (await check("POST", "/v1/files", "/v1/files", data={"purpose": "batch"}, files={"file": b"x"}))["id"]
    await check("GET", "/v1/files", "/v1/files?limit=1&order=asc&purpose=batch")
    await check("GET", "/v1/files/{file_id}", f"/v1/files/{file}")
    await check("GET", "/v1/files/{file_id}/content", f"/v1/files/{file}/content")
    asked = {"input_file_id": file, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    batch = (await check("POST", "/v1/batches", "/v1/batches", json=asked))["id"]
    async with asyncio.timeout(10):
        while (await check("GET", "/v1/batches/{batch_id}", f"/v1/batches/{batch}"))["status"] != "failed":
            pass
    await check("GET", "/v1/batches", "/v1/batches?limit=1")
    refused = await check("POST", "/v1/batches/{batch_id}/cancel", f"/v1/batches/{batch}/cancel")
    assert refused["error"]["code"] == "wrong_state"
    await check("DELETE", "/v1/files/{file_id}", f"/v1/files/{file}")
    assert (await check("GET", "/v1/files/{file_id}", f"/v1/files/{file}"))["error"]["code"] == "file_not_found"


async def test_other_answers_and_errors_are_as_described(client):
    await client.post("/v1/completions", json=VALID["/v1/completions"], headers={"x-request-id": "asked"})
    kept = (await client.post("/v1/responses", json=VALID["/v1/responses"])).json()["id"]
    example = {
        "/v1/models": "/v1/models",
        "/v1/models/{model}": "/v1/models/bytes",
        "/v1/requests/{request_id}": "/v1/requests/asked",
        "/v1/responses/{response_id}": f"/v1/responses/{kept}",
        "/v1/responses/{response_id}/input_items": f"/v1/responses/{kept}/input_items?limit=1",
        "/health": "/health",
        "/ready": "/ready",
        "/openapi.json": "/openapi.json",
    }
    for path, url in example.items():
        answer = await client.get(url)
        described = DOCUMENT["paths"][path]["get"]["responses"][str(answer.status_code)]
        validator(described["content"]["application/json"]["schema"]).validate(answer.json())
        assert answer.status_code == 200
    deleted = await client.delete(f"/v1/responses/{kept}")
    described = DOCUMENT["paths"]["/v1/responses/{response_id}"]["delete"]["responses"]["200"]
    validator(described["content"]["application/json"]["schema"]).validate(deleted.json())
    refused = {
        ("/v1/completions", 400): await client.post("/v1/completions", json={"prompt": 1}),
        ("/v1/completions", 404): await client.post("/v1/completions", json={"prompt": "a", "model": "other"}),
        ("/v1/completions", 415): await client.post("/v1/completions", content="{}"),
        ("/v1/messages", 400): await client.post("/v1/messages", json={"messages": 1}),
        ("/v1/messages", 415): await client.post("/v1/messages", content="{}"),
    }
    for (path, status), answer in refused.items():
        assert answer.status_code == status
        described = DOCUMENT["paths"][path]["post"]["responses"][str(status)]
        validator(described["content"]["application/json"]["schema"]).validate(answer.json())


def test_the_header_of_fields_without_effect_is_described():
    for op in OPERATIONS:
        answer = DOCUMENT["paths"][op.path.replace(":path", "")][op.method.lower()]["responses"]["200"]
        assert ("kvferry-ignored" in answer["headers"]) is (op.body is not None)


async def test_the_served_document_requires_keys_if_the_gateway_does(client):
    served = (await client.get("/openapi.json")).json()
    assert served["paths"]["/v1/models"]["get"]["security"] == [{"apiKey": []}, {}]
    assert served["components"] == json.loads(json.dumps(DOCUMENT["components"]))
    keyed = openapi_document("1.0", needs_key=True)
    assert keyed["paths"]["/v1/models"]["get"]["security"] == [{"apiKey": []}]
    assert "security" not in keyed["paths"]["/health"]["get"]
