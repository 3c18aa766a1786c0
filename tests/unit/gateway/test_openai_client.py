"""OpenAI's Python client against the real server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from harness.fakes.byte_model import BOS
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway
from harness.fakes.scripted_tokens import expected_tokens
from harness.fakes.scripted_worker import Act, Fault

from kvferry.core.errors import Unavailable, UnknownModel
from kvferry.core.sampling import SamplingParams

_MESSAGES: Any = [{"role": "user", "content": "hello"}]
_CHAT_PROMPT = list(b"<user>hello<assistant>")


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway() as running:
        yield running


@pytest.fixture
async def client(gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as opened:
        yield opened


def expected(prompt: list[int], count: int, seed: int = 3, index: int = 0) -> str:
    return bytes(expected_tokens(prompt, SamplingParams(seed=seed), count, index)).decode()


async def test_chat(client):
    answer = await client.chat.completions.create(model="bytes", messages=_MESSAGES, max_tokens=10, seed=3)
    choice = answer.choices[0]
    assert choice.message.content == expected(_CHAT_PROMPT, 10)
    assert (choice.message.role, choice.finish_reason, choice.logprobs) == ("assistant", "length", None)
    assert (answer.object, answer.model) == ("chat.completion", "bytes")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(_CHAT_PROMPT), 10, 32)
    assert usage.prompt_tokens_details.cached_tokens == 1
    assert answer.kvferry["handoff_outcome"] == "fetched"
    assert answer.kvferry["decode_worker"] == "d0"


async def test_chat_as_a_stream(client):
    stream = await client.chat.completions.create(
        model="bytes",
        messages=_MESSAGES,
        max_completion_tokens=10,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert deltas[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in deltas) == expected(_CHAT_PROMPT, 10)
    assert [choice.finish_reason for choice in deltas if choice.finish_reason] == ["length"]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 10
    assert chunks[-1].kvferry["prefill_worker"] == "p0"
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_completion_and_its_stream_are_the_same(client):
    completion_fields: Any = {"model": "bytes", "prompt": "abc", "max_tokens": 9, "seed": 3}
    whole = await client.completions.create(**completion_fields)
    stream = await client.completions.create(**completion_fields, stream=True)
    chunks = [chunk async for chunk in stream]
    assert whole.choices[0].text == expected([BOS, *b"abc"], 9)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


async def test_completions_have_openais_default_length(client):
    answer = await client.completions.create(model="bytes", prompt="abc")
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
async def test_two_samples(client, stream):
    answer = await client.chat.completions.create(
        model="bytes", messages=_MESSAGES, max_tokens=8, seed=3, n=2, stream=stream
    )
    texts = {0: "", 1: ""}
    if stream:
        async for chunk in answer:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        texts = {choice.index: choice.message.content for choice in answer.choices}
        assert answer.usage.completion_tokens == 16
        assert answer.usage.prompt_tokens == len(_CHAT_PROMPT)
    assert texts == {index: expected(_CHAT_PROMPT, 8, index=index) for index in (0, 1)}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_text_before_it(gateway, client, stream):
    full = expected(_CHAT_PROMPT, 100)
    stop = full[20:23]
    answer = await client.chat.completions.create(
        model="bytes", messages=_MESSAGES, max_tokens=100, seed=3, stop=[stop], stream=stream
    )
    if stream:
        chunks = [chunk.choices[0] async for chunk in answer]
        text, reason = "".join(c.delta.content or "" for c in chunks), chunks[-1].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, reason) == (full[: full.index(stop)], "stop")


async def test_several_prompts_as_text_and_as_token_ids(client):
    texts = await client.completions.create(model="bytes", prompt=["ab", "cd"], max_tokens=5, seed=3, n=2)
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    assert texts.choices[3].text == expected([BOS, *b"cd"], 5, index=1)
    assert texts.usage.prompt_tokens == 6
    ids = await client.completions.create(model="bytes", prompt=[[BOS, *b"ab"], [BOS, *b"cd"]], max_tokens=5, seed=3)
    assert [choice.text for choice in ids.choices] == [texts.choices[0].text, texts.choices[2].text]
    one = await client.completions.create(model="bytes", prompt=[BOS, *b"ab"], max_tokens=5, seed=3)
    assert one.choices[0].text == texts.choices[0].text


async def test_log_probabilities_of_chat(client):
    answer = await client.chat.completions.create(
        model="bytes", messages=_MESSAGES, max_tokens=3, seed=3, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert "".join(token.token for token in content) == answer.choices[0].message.content
    assert [token.logprob for token in content] == [-0.5] * 3
    assert [len(token.top_logprobs) for token in content] == [2] * 3
    assert content[0].bytes == [ord(content[0].token)]
    assert content[0].top_logprobs[1].token == "B"


async def test_log_probabilities_of_completions(client):
    answer = await client.completions.create(model="bytes", prompt="ab", max_tokens=3, seed=3, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert (logprobs.token_logprobs, logprobs.text_offset) == ([-0.5] * 3, [0, 1, 2])


async def test_models(client):
    assert [model.id async for model in client.models.list()] == ["bytes"]
    assert (await client.models.retrieve("bytes")).id == "bytes"
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here"):
        await client.models.retrieve("gpt-4")


async def test_errors_have_the_clients_own_classes(client):
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="gpt-4", messages=_MESSAGES)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="bytes", messages=_MESSAGES, temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")


async def test_an_error_in_the_middle_of_a_stream_reaches_the_client():
    async with (
        scripted_gateway() as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as client,
    ):
        fault = Fault(Act.FAIL, after_tokens=3, error=UnknownModel("this worker changed its model"))
        gateway.workers.decode[0].faults["decode"].append(fault)
        stream = await client.chat.completions.create(model="bytes", messages=_MESSAGES, max_tokens=10, stream=True)
        with pytest.raises(openai.APIError, match="changed its model"):
            _ = [chunk async for chunk in stream]


async def test_an_error_before_the_first_token_is_a_status(gateway, client):
    worker = gateway.workers.decode[0]
    worker.draining = True
    await gateway.gateway.fleet.wait_until(lambda fleet: not fleet.views()[1].takes_work)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(model="bytes", messages=_MESSAGES, stream=True)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"


async def test_a_stream_survives_the_death_of_its_decode_worker():
    async with (
        scripted_gateway(decode=2) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as client,
    ):
        first, second = gateway.workers.decode
        first.faults["decode"] = second.faults["decode"]
        first.faults["decode"].append(Fault(Act.DIE, after_tokens=4))
        stream = await client.chat.completions.create(
            model="bytes",
            messages=_MESSAGES,
            max_tokens=12,
            seed=3,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == expected(_CHAT_PROMPT, 12)
        assert chunks[-1].kvferry["resumed"] == 1


@pytest.mark.parametrize("method", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_frees_all_resources_at_once(gateway, client, method, stream):
    worker = gateway.workers.prefill[0] if method == "prefill" else gateway.workers.decode[0]
    worker.faults[method].append(Fault(Act.HANG, after_tokens=3))

    async def ask() -> None:
        answer = await client.chat.completions.create(model="bytes", messages=_MESSAGES, max_tokens=20, stream=stream)
        _ = [chunk async for chunk in answer]

    task = asyncio.create_task(ask())
    await asyncio.wait_for(worker.fault_reached.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gateway.idle()


async def test_the_loss_of_a_prefill_worker_is_invisible_to_the_client(gateway, client):
    fault = Fault(Act.FAIL, error=Unavailable("the disk is gone"))
    gateway.workers.prefill[0].faults["prefill"].append(fault)
    answer = await client.chat.completions.create(model="bytes", messages=_MESSAGES, max_tokens=4, seed=3)
    assert answer.choices[0].message.content == expected(_CHAT_PROMPT, 4)
    assert answer.kvferry["handoff_outcome"] == ""


async def test_a_constraint_reaches_the_workers(client, gateway):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await client.chat.completions.create(
        model="bytes",
        messages=_MESSAGES,
        max_tokens=4,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    workers = gateway.workers
    calls = [*workers.prefill[0].prefills, *workers.decode[0].decodes]
    seen = [call.sampling.constraint.json_schema for call in calls]
    assert seen == ['{"type": "object", "properties": {"a": {"type": "integer"}}}'] * 2, (
        "the prefill and the decode worker"
    )


async def test_a_constraint_that_cannot_be_compiled_is_named_by_its_field(client):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model="bytes", messages=_MESSAGES, extra_body={"guided_regex": "unsupported"}
        )
    assert caught.value.body["param"] == "guided_regex"
    assert "unsupported" in caught.value.body["message"]


async def test_a_priority_reaches_the_workers(client, gateway):
    fields = {"model": "bytes", "messages": _MESSAGES, "max_tokens": 4}
    await client.chat.completions.create(**fields, extra_body={"priority": -3})
    workers = gateway.workers
    assert [call.priority for call in (*workers.prefill[0].prefills, *workers.decode[0].decodes)] == [-3, -3]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**fields, extra_body={"priority": 1 << 40})
    assert caught.value.body["param"] == "priority"


async def test_requests_with_unequal_salts_share_no_blocks(client, gateway):
    fields = {"model": "bytes", "messages": _MESSAGES, "max_tokens": 4}
    for salt in ("a", "b", "a", None):
        await client.chat.completions.create(**fields, extra_body={"cache_salt": salt})
    workers = gateway.workers
    first, other, again, plain = [call.scope for call in workers.prefill[0].prefills]
    assert first == again
    assert len({first, other, plain}) == 3
    assert plain == ""
    assert [call.scope for call in workers.decode[0].decodes] == [first, other, again, plain]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**fields, extra_body={"cache_salt": "x" * 2000})
    assert caught.value.body["param"] == "cache_salt"
