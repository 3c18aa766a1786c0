"""API keys, statuses and types of errors of the Messages API, against a whole gateway."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.fakes.scripted_gateway import scripted_gateway

from kvferry.core.errors import KvferryError
from kvferry.gateway.decide.config import HttpConfig
from kvferry.gateway.http.messages.output import error_body

GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


def check_error(response: httpx.Response, status: int, kind: str) -> str:
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    return body["error"]["message"]


async def test_a_key_is_accepted_in_either_header(tmp_path: Path, caplog):
    keys = tmp_path / "keys"
    keys.write_text("sk-one acme\nsk-two beta\n")
    http = HttpConfig(address="127.0.0.1:0", api_keys_file=keys)
    async with scripted_gateway(http=http) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        for headers in ({}, {"x-api-key": "sk-three"}, {"x-api-key": "sk-two", "authorization": "Bearer sk-three"}):
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                check_error(await client.post(path, json=GOOD, headers=headers), 401, "authentication_error")
        for headers in ({"x-api-key": "sk-two"}, {"authorization": "Bearer sk-two", "x-api-key": "other"}):
            assert (await client.post("/v1/messages", json=GOOD, headers=headers)).status_code == 200
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
        assert {call.scope for call in gateway.workers.prefill[0].prefills} == {"beta"}
        await gateway.idle()
    assert "sk-" not in caplog.text


async def test_types_of_errors():
    http = HttpConfig(address="127.0.0.1:0", max_body_bytes=10_000)
    async with scripted_gateway(http=http) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        missing = {"messages": GOOD["messages"]}
        assert "max_tokens is missing" in check_error(
            await client.post("/v1/messages", json=missing), 400, "invalid_request_error"
        )
        a, b = ({"type": "json_schema", "schema": {"type": kind}} for kind in ("object", "array"))
        both = {**GOOD, "output_format": a, "output_config": {"format": b}}
        assert "output_format and output_config.format differ" in check_error(
            await client.post("/v1/messages", json=both), 400, "invalid_request_error"
        )
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            other = await client.post(path, json={**GOOD, "model": "claude"})
            assert "'claude' is not served here" in check_error(other, 404, "not_found_error")
            large = await client.post(path, json={**GOOD, "system": "x" * 20_000})
            check_error(large, 413, "request_too_large")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (408, "invalid_request_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_the_type_follows_the_status(status, kind):
    error = type("Failure", (KvferryError,), {"http_status": status})("failed")
    assert json.loads(error_body(error, "r")) == {
        "type": "error",
        "error": {"type": kind, "message": "failed", "details": {"error_code": "unknown"}},
        "request_id": "r",
    }


async def test_tokens_that_were_cached_are_counted_apart():
    async with scripted_gateway() as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        whole = (await client.post("/v1/messages", json=GOOD)).json()
        usage = whole["usage"]
        assert usage["cache_read_input_tokens"] == 1
        assert usage["cache_creation_input_tokens"] == 2
        parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        assert sum(usage[part] for part in parts) == len("<user>hello<assistant>")
        assert whole["kvferry"]["decode_worker"] == "d0"
        await gateway.idle()
