"""Tokens in, tokens out: fields, responses, streams and errors of POST /inference/v1/generate."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from harness.fakes.scripted_answers import AnsweringApi, answering_api

from kvferry.core.constraint import ConstraintKind
from kvferry.text.answers.registry import CallFormat

PATH = "/inference/v1/generate"
PROMPT = [104, 105]


@pytest.fixture
async def api() -> AsyncIterator[AnsweringApi]:
    async with answering_api(CallFormat.HERMES, has_reasoning=False) as running:
        running.source.answers = ("yes",)
        yield running


@pytest.fixture
async def http(api: AnsweringApi) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=api.url.removesuffix("/v1"), timeout=20) as client:
        yield client


async def generate(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post(PATH, json={"token_ids": PROMPT, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


async def refusal(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post(PATH, json=fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]  # type: ignore[no-any-return]


async def test_a_response_has_tokens_and_no_text(http, api):
    found = await generate(http, sampling_params={"max_tokens": 5, "temperature": 0.0}, request_id="mine-1")
    assert found["request_id"] == "mine-1"
    (choice,) = found["choices"]
    assert bytes(choice["token_ids"]) == b"yes"
    assert choice["finish_reason"] == "stop"
    assert "text" not in choice
    assert found["usage"]["prompt_tokens"] == 2
    (request,) = api.source.requests
    assert list(request.token_ids) == PROMPT
    assert request.sampling.max_tokens == 5


async def test_the_default_limit_is_the_one_of_vllm(http, api):
    await generate(http)
    await generate(http, sampling_params={"max_tokens": None})
    limits = [request.sampling.max_tokens for request in api.source.requests]
    assert limits == [16, (1 << 16) - len(PROMPT)], "a null is no limit"


async def test_a_response_without_request_id_has_the_one_of_the_header(http):
    answer = await http.post(PATH, json={"token_ids": PROMPT}, headers={"x-request-id": "given-7"})
    assert answer.json()["request_id"] == answer.headers["x-request-id"] == "given-7"


async def test_each_sample_has_its_tokens_and_log_probabilities(http, api):
    api.source.answers = ("abc", "de")
    found = await generate(http, sampling_params={"n": 2, "logprobs": 0})
    assert [bytes(choice["token_ids"]) for choice in found["choices"]] == [b"abc", b"de"]
    for choice in found["choices"]:
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


async def test_a_stream_has_the_tokens_of_each_step(http, api):
    api.source.answers = ("abcdef",)
    fields = {"token_ids": PROMPT, "stream": True, "stream_options": {"include_usage": True}}
    answer = await http.post(PATH, json=fields)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    assert bytes(i for event in events for choice in event["choices"] for i in choice["token_ids"]) == b"abcdef"
    assert [c["finish_reason"] for e in events for c in e["choices"]].count("stop") == 1
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 6
    assert len({event["request_id"] for event in events}) == 1


async def test_a_constraint_reaches_the_engine(http, api):
    await generate(http, sampling_params={"structured_outputs": {"choice": ["yes", "no"]}})
    constraint = api.source.requests[0].sampling.constraint
    assert constraint is not None
    assert constraint.kind is ConstraintKind.CHOICE


async def test_fields_without_effect_are_named(http):
    sampling = {"max_tokens": 1, "detokenize": True, "output_kind": 2, "skip_reading_prefix_cache": True}
    answer = await http.post(
        PATH, json={"token_ids": PROMPT, "sampling_params": sampling, "kv_transfer_params": {"a": 1}}
    )
    assert answer.status_code == 200
    named = answer.headers["kvferry-ignored"]
    assert "kv_transfer_params" in named
    assert "sampling_params.output_kind" in named
    assert "detokenize" not in named


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({}, "token_ids", "missing"),
        ({"token_ids": []}, "token_ids", "empty"),
        ({"token_ids": "hi"}, "token_ids", "list"),
        ({"token_ids": [1, True]}, "token_ids.1", "integer"),
        ({"token_ids": [1, "2"]}, "token_ids.1", "integer"),
        ({"token_ids": [1, 10**9]}, "token_ids", "vocabulary"),
        ({"token_ids": [1, -1]}, "token_ids", "vocabulary"),
        ({"token_ids": PROMPT, "sampling_params": {"temperature": -1}}, "sampling_params.temperature", "from 0"),
        ({"token_ids": PROMPT, "sampling_params": {"n": 0}}, "sampling_params.n", "1"),
        ({"token_ids": PROMPT, "sampling_params": {"logprobs": -2}}, "sampling_params.logprobs", "0"),
        ({"token_ids": PROMPT, "sampling_params": {"stop": ["a"] * 2000}}, "sampling_params.stop", "1024"),
        (
            {"token_ids": PROMPT, "sampling_params": {"structured_outputs": {"regex": "a", "grammar": "b"}}},
            "sampling_params.structured_outputs.grammar",
            "one",
        ),
        (
            {"token_ids": PROMPT, "sampling_params": {"thinking_token_budget": 5}},
            "sampling_params.thinking_token_budget",
            "chat/completions",
        ),
        ({"token_ids": [1] * (1 << 17)}, "token_ids", "prompt is too long: 131072 tokens > 65535 maximum"),
        ({"token_ids": PROMPT, "sampling_params": [1]}, "sampling_params", "sampling_params must be an object, not"),
        ({"token_ids": PROMPT, "request_id": "a b"}, "request_id", "letters"),
        ({"token_ids": PROMPT, "features": {"image": 1}}, "features", "text"),
        ({"token_ids": PROMPT, "stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ],
)
async def test_an_error_names_the_field_of_this_api(http, fields, field, said):
    error = await refusal(http, **fields)
    assert said in error["message"]
    assert error["param"] == field
