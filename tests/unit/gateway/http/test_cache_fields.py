"""Hints about the cache in requests: what they ask of the cache, in each API."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway
from pydantic import ValidationError

from kvferry.core.errors import InvalidRequest, Unavailable
from kvferry.core.ids import RequestId
from kvferry.core.retention import CacheHints, Retention, RetentionOutcome
from kvferry.core.sampling import SamplingParams
from kvferry.gateway.decide.lifecycle.sample_run import SampleRun
from kvferry.gateway.http.fields.cache_fields import CacheControl, CacheHintFields
from kvferry.gateway.http.fields.strict import parse_fields
from kvferry.gateway.http.messages.body import MessageRequest
from kvferry.gateway.http.openai.schema import ChatRequest
from kvferry.serving.request import Caller, Request

HI = {"role": "user", "content": "hi"}
MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def action(kind: str, version: str = "1.0", **payload: object) -> dict[str, object]:
    return {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}


def envelope(*actions: dict[str, object]) -> dict[str, object]:
    return {"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}}


@pytest.mark.parametrize(
    ("fields", "seconds", "key"),
    [
        ({}, 0.0, ""),
        ({"prompt_cache_key": "k"}, 0.0, "k"),
        ({"session_id": "s"}, 0.0, "s"),
        ({"prompt_cache_key": "k", "session_id": "s"}, 0.0, "k"),
        ({"prompt_cache_options": {}}, 1800.0, ""),
        ({"prompt_cache_options": {"ttl": "12h"}}, 43200.0, ""),
        ({"prompt_cache_options": {"mode": "explicit", "ttl": "12h"}}, 0.0, ""),
        ({"prompt_cache_retention": "in_memory"}, 0.0, ""),
        ({"prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}}, 86400.0, ""),
        (envelope(action("retain", ttl_seconds=90), action("session", session_id="s")), 90.0, "s"),
        (envelope(action("retain", "2.0", ttl_seconds=90), action("prefetch")), 0.0, ""),
    ],
)
def test_fields_of_the_body_say_how_long_and_with_which_key(fields: Any, seconds: float, key: str) -> None:
    assert CacheHintFields.model_validate(fields).cache_hints() == CacheHints(seconds, key)


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        ({"messages": [{**HI, "content": [{"type": "text", "text": "a", "cache_control": MARK}]}]}, 300.0),
        ({"messages": [{**HI, "cache_control": HOUR}, HI]}, 3600.0),
        ({"messages": [HI], "cache_control": HOUR}, 3600.0),
        ({"messages": [HI], "tools": [{"type": "function", "function": {"name": "f"}, "cache_control": MARK}]}, 300.0),
        (
            {
                "messages": [
                    {**HI, "content": [{"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}]}
                ],
                "prompt_cache_options": {"mode": "explicit", "ttl": "12h"},
            },
            43200.0,
        ),
    ],
)
def test_marks_in_a_chat_keep_its_whole_prompt(body: dict[str, Any], seconds: float) -> None:
    request = parse_fields(ChatRequest, body)
    assert request.cache_hints(request.cache_marks()).retain_seconds == seconds


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"cache_control": MARK}, 300.0),
        ({"cache_control": {"type": "ephemeral", "ttl": "999h"}}, 86_400.0),
        ({"system": [{"type": "text", "text": "a", "cache_control": HOUR}]}, 3600.0),
        ({"tools": [{"name": "f", "input_schema": {}, "cache_control": MARK}]}, 300.0),
        ({"messages": [{**HI, "content": [{"type": "text", "text": "a", "cache_control": HOUR}]}]}, 3600.0),
        ({}, 0.0),
    ],
)
def test_marks_of_the_messages_api_keep_its_whole_prompt(fields: dict[str, Any], seconds: float) -> None:
    request = parse_fields(MessageRequest, {"messages": [HI], "max_tokens": 1, **fields})
    assert request.cache_hints().retain_seconds == seconds


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_options": {"ttl": "0s"}},
        {"prompt_cache_options": {"ttl": "forever"}},
        {"prompt_cache_key": "k" * 1025},
        {"prompt_cache_retention": "2h"},
        {"kv_hints": {"actions": []}},
        envelope(*[action("prefetch")] * 33),
    ],
)
def test_hints_of_another_form_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CacheHintFields.model_validate(fields)


@pytest.mark.parametrize("payload", [{}, {"ttl_seconds": "9"}, {"ttl_seconds": 0}, {"ttl_seconds": True}])
def test_a_payload_of_another_form_is_refused_by_its_place(payload: dict[str, Any]) -> None:
    fields = CacheHintFields.model_validate(envelope(action("retain", **payload)))
    with pytest.raises(InvalidRequest, match="time in seconds above 0") as caught:
        fields.cache_hints()
    assert caught.value.field == "kv_hints.actions.0.payload.ttl_seconds"
    sessions = CacheHintFields.model_validate(envelope(action("session", session_id="")))
    with pytest.raises(InvalidRequest, match="a text of 1 to 1024 characters"):
        sessions.cache_hints()


def test_the_longest_of_several_marks_counts() -> None:
    marks = [None, CacheControl(type="ephemeral"), CacheControl(type="ephemeral", ttl="1h"), None]
    assert CacheHintFields().cache_hints(marks).retain_seconds == 3600.0


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway() as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [HI], "max_tokens": 2}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
        ("/inference/v1/generate", {"token_ids": [97], "sampling_params": {"max_tokens": 2}}),
    ],
)
async def test_each_api_passes_its_hints_on_and_says_what_was_granted(
    gateway: ScriptedGateway, path: str, body: dict[str, Any]
) -> None:
    hints = {"prompt_cache_key": "k", "prompt_cache_options": {"ttl": "1h"}, **envelope(action("prefetch"))}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        answer = await client.post(path, json={**body, **hints})
    assert answer.status_code == 200, answer.text
    assert answer.headers["kvferry-ignored"] == "kv_hints.prefetch"
    (prefill,) = [request for worker in gateway.workers.all for request in worker.prefills]
    assert prefill.retain_seconds == 3600.0
    retention = answer.json()["kvferry"]["retention"]
    assert (retention["outcome"], retention["seconds"]) == ("retained", 3600.0)
    assert retention["num_tokens"] == len(prefill.token_ids)
    assert retention["expires_at"] > 1e9
    metrics = await gateway_metrics(gateway)
    assert 'kvferry_gateway_retentions_total{outcome="retained"} 1.0' in metrics


async def test_the_samples_of_a_prompt_ask_once(gateway: ScriptedGateway) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "n": 3, "prompt_cache_options": {"ttl": "1h"}}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    asked = [request.retain_seconds for worker in gateway.workers.all for request in worker.prefills]
    assert sorted(asked) == [0.0, 0.0, 3600.0]


async def gateway_metrics(gateway: ScriptedGateway) -> str:
    async with httpx.AsyncClient(base_url=gateway.admin_url, timeout=20) as client:
        return (await client.get("/metrics")).text


async def test_a_beam_search_keeps_nothing(gateway: ScriptedGateway) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "n": 2, "use_beam_search": True, "prompt_cache_options": {"ttl": "1h"}}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["kvferry"]["retention"] is None
    assert {request.retain_seconds for worker in gateway.workers.all for request in worker.prefills} == {0.0}


def test_what_a_lost_worker_kept_is_lost() -> None:
    run = SampleRun(Request(Caller(RequestId("r")), [1, 2], SamplingParams(seed=1, max_tokens=4)))
    kept = Retention(RetentionOutcome.RETAINED, 2, 60.0)
    run.retained(kept, "a:1")
    run.failed(Unavailable("gone"), "b:1")
    assert run.timing.retention == kept
    run.failed(Unavailable("gone"), "a:1")
    assert run.timing.retention is None
    run.retained(kept, "b:1")
    assert run.timing.retention == kept
