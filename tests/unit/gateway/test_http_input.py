"""Invalid input over real sockets: errors name the field and have no stack trace. One gateway serves the whole file."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from harness.fakes.scripted_gateway import scripted_gateway

from kvferry.gateway.decide.config import HttpConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

_CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
_GOOD: dict[str, Any] = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    http = HttpConfig(address="127.0.0.1:0", max_body_bytes=8192, max_prompts=3)
    async with (
        scripted_gateway(http=http) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as opened,
    ):
        yield opened


def check_error(response: httpx.Response, status: int, param: str | None = None, words: str = "") -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert words in error["message"]
    assert response.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function", "missing"),
        (
            {"functions": [{"name": "f"}]},
            "functions",
            "not supported: use tools; leave it out or set it to [], not another array",
        ),
        (
            {"chat_template": "x"},
            "chat_template",
            "the model's template is used; leave it out or set it to null, not a JSON string",
        ),
        ({"thinking_token_budget": -1}, "thinking_token_budget", "greater than or equal to 0"),
        (
            {"thinking_token_budget": 5, "reasoning": {"max_tokens": 6}},
            "thinking_token_budget",
            "reasoning.max_tokens another one; set only one",
        ),
        ({"prompt": "x"}, "prompt", "a conversation is sent in messages"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "'none', 'minimal', 'low', 'medium', 'high' or 'xhigh'"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning_effort", "set only one"),
        ({"reasoning": {"max_tokens": "5"}}, "reasoning.max_tokens", "integer"),
        ({"continue_final_message": True}, "continue_final_message", "role assistant"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "cannot both be true",
        ),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": "b"}},
            "structured_outputs.whitespace_pattern",
            "",
        ),
        ({"k" * 300: 1}, "k" * 39 + "…", "a name of 300 characters; at most 256"),
        ({"temperature": "hot"}, "temperature", "not a JSON string"),
        ({"temperature": True}, "temperature", "not true"),
        ({"temperature": 200}, "temperature", "from 0.0 to 100.0"),
        ({"top_p": 0}, "top_p", "greater than 0.0"),
        ({"n": 0}, "n", "not 0"),
        ({"n": 1000}, "n", "not 1000"),
        ({"n": 1.5}, "n", "1.5"),
        ({"max_tokens": 0}, "max_tokens", "1 to"),
        ({"max_tokens": -1}, "max_tokens", "-1"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "set only one"),
        ({"min_tokens": 9}, "min_tokens", "min_tokens must be at most max_tokens"),
        ({"stop": [""]}, "stop", "0 characters"),
        ({"stop": ["a"] * 17}, "stop", "17 strings"),
        ({"stop": [1]}, "stop.0", "string"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"1": 200}}, "logit_bias", "100"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"01": 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"+1": 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"²": 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "999"),
        ({"seed": 1 << 70}, "seed", "whole number"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"messages": []}, "messages", "messages is empty; send at least one"),
        ({"messages": "hi"}, "messages", "not a JSON string"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", ""),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "missing"),
        ({"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]}, "messages.0.audio", "not supported"),
        ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}, "messages.0.reasoning", "assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", ""),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "is 512"),
        ({"model": ""}, "model", "model '' is not served here"),
    ],
)
async def test_bad_fields_are_refused_by_name(client, change, param, words):
    response = await client.post(_CHAT, json={**_GOOD, **change})
    check_error(response, 404 if param == "model" else 400, param, words)


@pytest.mark.parametrize(
    "no_op",
    [
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False, "user": "u"},
        {"temperature": None, "stop": None, "n": None, "stream": None, "logit_bias": None, "seed": None},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}]}]},
        {"messages": [{"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}]},
        {"spaces_between_special_tokens": False, "skip_special_tokens": True, "include_stop_str_in_output": False},
        {"typical_p": 0.5, "allowed_token_ids": [5], "bad_words": ["x"], "truncate_prompt_tokens": -1},
        {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [5], "min_tokens": 1, "top_p": 1},
    ],
)
async def test_fields_at_values_without_effect_are_accepted(client, no_op):
    response = await client.post(_CHAT, json={**_GOOD, **no_op})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1, 2]", "JSON object"),
        (b'"x"', "JSON object"),
        (b'{"model": "bytes", "messages": [], "temperature": NaN}', "not JSON"),
        (b'{"model": "bytes", "messages": [], "temperature": Infinity}', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"a":' * 500 + b"1" + b"}" * 500, "not JSON"),
        (b'{"model": "bytes", "messages": [{"role": "user", "content": "\\ud800"}]}', "not JSON"),
    ],
)
async def test_bodies_that_are_not_json_are_refused(client, body, words):
    check_error(await client.post(_CHAT, content=body, headers=JSON), 400, None, words)


async def test_numbers_too_large_for_a_double_are_refused(client):
    body = json.dumps(_GOOD).replace('"max_tokens": 3', '"temperature": 1e999')
    check_error(await client.post(_CHAT, content=body.encode(), headers=JSON), 400, "temperature", "finite")


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize(
    "field", ["n", "seed", "max_tokens", "temperature", "top_k", "stop_token_ids", "logit_bias", "prompt", "stream"]
)
async def test_numbers_of_any_length_are_refused(client, field, digits):
    number = "7" * digits
    value = {"stop_token_ids": f"[{number}]", "prompt": f"[{number}]", "logit_bias": f'{{"5": {number}}}'}
    prompt = "" if field == "prompt" else '"prompt": "a", '
    body = f'{{"model": "bytes", {prompt}"{field}": {value.get(field, number)}}}'
    response = await client.post("/v1/completions", content=body.encode(), headers=JSON)
    assert response.status_code == 400, response.text


async def test_a_prompt_never_appears_in_an_error(client):
    secret = {"role": "user", "content": {"text": "my secret"}}
    response = await client.post(_CHAT, json={**_GOOD, "messages": [secret]})
    assert "secret" not in response.text


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/jsonp"},
        {"content-encoding": "gzip"},
    ],
)
async def test_a_body_without_the_content_type_of_json_is_refused(client, headers):
    # A browser sends other content types across origins without a preflight request; these requests must be refused.
    response = await client.post(_CHAT, content=json.dumps(_GOOD).encode(), headers=headers)
    assert check_error(response, 415, None, "application/json")["code"] == "unsupported_media_type"


async def test_json_is_taken_under_its_name(client):
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    response = await client.post(_CHAT, content=json.dumps(_GOOD).encode(), headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("declared", [True, False])
async def test_large_bodies_are_refused(client, declared):
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * 1000

    content: Any = b" " * 10_000 if declared else parts()
    check_error(await client.post(_CHAT, content=content, headers=JSON), 413, None, "8192")


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"prompt": []}, "prompt", "0 prompts"),
        ({"prompt": ["a"] * 4}, "prompt", "1 to 3"),
        ({"prompt": ""}, None, ""),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": [1, "a"]}, "prompt.1", ""),
        ({"prompt": [999]}, "prompt", "token id 999"),
        ({"prompt": [-1]}, "prompt", "token id -1"),
        ({"prompt": [1.5]}, "prompt.0", "token ids"),
        ({"prompt": {"a": 1}}, "prompt", ""),
        ({"prompt": None}, "prompt", ""),
        ({"prompt": "a", "suffix": "b"}, "suffix", 'set it to "", not another string'),
        ({"prompt": "a", "echo": 1}, "echo", "not 1"),
        ({"prompt": "a", "best_of": 0}, "best_of", "not 0"),
        ({"prompt": "a", "best_of": 65}, "best_of", "not 65"),
        ({"prompt": "a", "best_of": 2, "n": 3}, "best_of", "best_of is 2, which is less than n=3"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of", "set stream to false"),
        ({"prompt": ["a"] * 3, "best_of": 64}, "best_of", "3 prompts with best_of=64 need 192 samples"),
        ({"prompt": "a", "typical_p": 0}, "typical_p", "greater than 0.0"),
        ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", "is empty"),
        ({"prompt": "a", "allowed_token_ids": [300]}, "allowed_token_ids", "token id 300"),
        ({"prompt": "a", "bad_words": [""]}, "bad_words", "0 characters"),
        ({"prompt": "a", "bad_words": "a"}, "bad_words", "not a JSON string"),
        ({"prompt": "a", "cache_salt": "x" * 2000}, "cache_salt", "has 2000 characters; at most 1024 are accepted"),
        (
            {"prompt": "a", "use_beam_search": True, "early_stopping": "x"},
            "early_stopping",
            "must be a valid boolean or 'never', not a JSON string",
        ),
        ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "keeps no token"),
        ({"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "from -1 to"),
        ({"prompt": "a" * 600, "truncate_prompt_tokens": 512}, "prompt", "512 tokens"),
        ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
        ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs", "from 0 to 20"),
        ({"prompt": "a", "prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "set stream to false"),
        ({"prompt": "a", "skip_special_tokens": 1}, "skip_special_tokens", "not 1"),
        ({"prompt": "a", "include_stop_str_in_output": "no"}, "include_stop_str_in_output", "not a JSON string"),
        ({"prompt": "a", "messages": []}, "messages", "POST /v1/chat/completions"),
        ({"prompt": "a", "prompt_embeds": "x"}, "prompt_embeds", "not supported"),
        ({"prompt": "a", "tools": [{"type": "function"}]}, "tools", "not supported"),
    ],
)
async def test_bad_completions_are_refused_by_name(client, change, param, words):
    response = await client.post("/v1/completions", json={"model": "bytes", "max_tokens": 3, **change})
    if param is None:  # an empty string becomes the begin-of-sequence token
        assert response.status_code == 200
    else:
        check_error(response, 400, param, words)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/page/none.js", 404, "not_found"),
        ("POST", "/v1/images/generations", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other/model", 404, "model_not_found"),
        ("GET", "/../etc/passwd", 404, "not_found"),
    ],
)
async def test_other_routes_answer_in_openais_form(client, method, path, status, code):
    response = await client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/models", "GET, HEAD"),
        ("/v1/responses/r", "DELETE, GET, HEAD"),
        ("/v1/responses/input_tokens", "POST"),
        ("/v1/score", "POST"),
    ],
)
async def test_a_wrong_method_is_answered_with_all_methods_of_the_path(client, path, methods):
    response = await client.request("PATCH", path)
    assert response.status_code == 405
    assert response.headers["allow"] == methods


@pytest.mark.parametrize("length", ["0" * 5000 + "30", "9" * 100])
async def test_a_content_length_of_any_number_of_digits_is_refused(client, length):
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    head = f"POST {_CHAT} HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(10):
        assert (await reader.readline()).split()[1] in (b"413", b"400")
    writer.close()


async def test_bodies_that_are_being_received_are_bounded_together(client):
    http = HttpConfig(address="127.0.0.1:0", max_body_bytes=1 << 20, max_buffered_bytes=3 << 20)
    async with scripted_gateway(http=http) as gateway:
        host, _, port = gateway.gateway.listening.http.rpartition(":")
        head = (
            f"POST {_CHAT} HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\ncontent-length: 1048576\r\n\r\n"
        )
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
        statuses = []
        for reader, writer in opened:
            writer.write(head.encode() + b" " * ((1 << 20) - 1))
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    statuses.append((await reader.readline()).split()[1])
        assert statuses == [b"429", b"429"]
        for _, writer in opened:
            writer.close()
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as fresh:
            for _ in range(50):
                answer = await fresh.post(_CHAT, json={**_GOOD, "user": "u" * 200_000})
                if answer.status_code == 200:
                    break
        assert answer.status_code == 200
        assert gateway.gateway.client_api.context.bodies.num_bytes == 0
