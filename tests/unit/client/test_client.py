"""Both clients against a real gateway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import grpc
import numpy as np
import pytest
from harness.fakes.byte_model import BOS
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway
from harness.fakes.scripted_tokens import expected_tokens, vector_of
from harness.fakes.scripted_worker import Act, Fault

from kvferry.client import AsyncClient, BeamParams, Client, Embedding, FinishReason, SamplingParams
from kvferry.core.errors import DeadlinePassed, InvalidRequest, Unauthenticated, Unavailable, UnknownModel
from kvferry.core.inference.pooling import Pooling, PoolingParams
from kvferry.core.limits import MAX_CACHE_SALT_CHARS
from kvferry.gateway.decide.config import HttpConfig
from kvferry.v1 import common_pb2, inference_pb2

_WISHES = SamplingParams(max_tokens=8, seed=3)
_TEXT = bytes(expected_tokens([BOS, *b"hello"], _WISHES, 8)).decode()


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway() as running:
        yield running


@pytest.fixture
async def client(gateway) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(gateway.gateway.listening.grpc) as opened:
        yield opened


async def test_chunks_have_text_tokens_and_a_final_message(client):
    chunks = [chunk async for chunk in client.generate("hello", _WISHES)]
    assert "".join(chunk.text for chunk in chunks) == _TEXT
    assert len(chunks) > 4
    assert chunks[-1].usage.output_tokens == 8
    assert (chunks[-1].timing.prefill_worker, chunks[-1].timing.handoff_outcome) == ("p0", "fetched")


async def test_complete_returns_whole_samples(client):
    first, second = await client.complete("hello", _WISHES, n=2)
    assert (first.index, first.text, first.finish_reason) == (0, _TEXT, FinishReason.LENGTH)
    assert bytes(first.token_ids).decode() == first.text
    assert second.text != first.text


async def test_token_ids_and_conversations_are_prompts_too(client):
    (by_ids,) = await client.complete([BOS, *b"hello"], _WISHES)
    assert by_ids.text == _TEXT
    conversation = [{"role": "user", "content": "hello"}]
    (by_chat,) = await client.complete(conversation, _WISHES)
    (by_template,) = await client.complete(await client.tokenize(conversation), _WISHES)
    assert by_chat.text == by_template.text


async def test_model_info_is_returned(client):
    assert (await client.model_info()).vocab_size == 258
    assert await client.detokenize(await client.tokenize("hé")) == "hé"


async def test_errors_keep_their_classes(client):
    with pytest.raises(UnknownModel, match="gpt-4"):
        await client.complete("x", model="gpt-4")
    with pytest.raises(InvalidRequest) as caught:
        await client.complete("x" * 600)
    assert (caught.value.field, caught.value.reason) == ("prompt", "CONTEXT_LENGTH_EXCEEDED")
    with pytest.raises(InvalidRequest, match="empty"):
        await client.complete([])


async def test_a_timeout_ends_the_call_everywhere(gateway, client):
    gateway.workers.decode[0].faults["decode"].append(Fault(Act.HANG, after_tokens=2))
    with pytest.raises(DeadlinePassed):
        await client.complete("hello", _WISHES, timeout=0.3)
    await gateway.idle()


@pytest.mark.parametrize("after", [0, 3])
async def test_leaving_a_stream_frees_all_resources(gateway, client, after):
    gateway.workers.decode[0].faults["decode"].append(Fault(Act.HANG, after_tokens=after))
    async with aclosing(client.generate("hello", _WISHES)) as chunks:
        await anext(chunks)
    await gateway.idle()


async def test_an_address_without_a_server_is_unavailable():
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            await client.complete("x")


async def test_a_key_is_sent(tmp_path: Path):
    (tmp_path / "keys").write_text("sk-one acme\n")
    http = HttpConfig(address="127.0.0.1:0", api_keys_file=tmp_path / "keys")
    async with scripted_gateway(http=http) as gateway:
        address = gateway.gateway.listening.grpc
        async with AsyncClient(address) as stranger:
            with pytest.raises(Unauthenticated):
                await stranger.complete("hello", _WISHES)
        async with AsyncClient(address, api_key="sk-one") as friend:
            assert await friend.complete("hello", _WISHES)
        assert gateway.workers.prefill[0].prefills[0].scope == "acme"


async def test_the_blocking_client_has_the_same_results(gateway):
    def use(address: str) -> None:
        with Client(address) as client:
            assert "".join(chunk.text for chunk in client.generate("hello", _WISHES)) == _TEXT
            (whole,) = client.complete("hello", _WISHES)
            assert whole.text == _TEXT
            assert client.model_info().model == "bytes"
            assert client.detokenize(client.tokenize("hé")) == "hé"
            with pytest.raises(UnknownModel):
                client.complete("x", model="gpt-4")
            chunks = client.generate("hello", SamplingParams(max_tokens=400))
            next(chunks)
            chunks.close()

    await asyncio.to_thread(use, gateway.gateway.listening.grpc)
    await gateway.idle()


async def test_vectors_of_texts_and_token_ids(client, gateway):
    first, second = await client.embed(["hello", [5, 6]], pooling="mean", dimensions=4, request_id="mine", priority=2)
    params = PoolingParams(Pooling.MEAN, dimensions=4)
    assert np.array_equal(first.values, vector_of([BOS, *b"hello"], params))
    assert np.array_equal(second.values, vector_of([5, 6], params))
    assert (first.num_prompt_tokens, second.num_prompt_tokens) == (6, 2)
    pooling_requests = gateway.workers.prefill[0].pools
    assert {(each.request_id, each.priority) for each in pooling_requests} == {("mine", 2)}

    def blocking() -> list[Embedding]:
        with Client(gateway.gateway.listening.grpc, timeout=20) as opened:
            return opened.embed(["hello"], normalize=False)

    (raw,) = await asyncio.to_thread(blocking)
    assert np.array_equal(raw.values, vector_of([BOS, *b"hello"], PoolingParams(normalize=False)))


@pytest.mark.parametrize(
    ("inputs", "options", "field"),
    [
        ([], {}, "inputs"),
        (["a"] * 1025, {}, "inputs"),
        (["a", []], {}, "inputs.1"),
        ([[1], [258]], {}, "inputs.1"),
        ([[1] * 513], {}, "inputs.0"),
        (["a"], {"dimensions": 9}, "dimensions"),
        (["a"], {"dimensions": 0}, "dimensions"),
        (["a"], {"pooling": "max"}, "pooling"),
        (["a"], {"priority": 5000}, "priority"),
        (["a"], {"cache_salt": "x" * (MAX_CACHE_SALT_CHARS + 1)}, "cache_salt"),
    ],
)
async def test_refused_vectors_name_the_field(client, inputs, options, field):
    with pytest.raises(InvalidRequest) as caught:
        await client.embed(inputs, **options)
    assert caught.value.field == field


async def test_hostile_messages_for_vectors(client, gateway):
    for message in (
        inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedRequest.Input()]),
        inference_pb2.EmbedRequest(
            inputs=[inference_pb2.EmbedRequest.Input(text="a")], pooling=common_pb2.PoolingParams(pooling=77)
        ),
        inference_pb2.EmbedRequest(
            inputs=[inference_pb2.EmbedRequest.Input(text="a")], pooling=common_pb2.PoolingParams(dimensions=1 << 31)
        ),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client._stub.Embed(message, timeout=20)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert gateway.workers.prefill[0].pools == []


async def test_a_cancelled_call_for_vectors_ends_the_worker_s(client, gateway):
    worker = gateway.workers.prefill[0]
    worker.faults["pool"] += [Fault(Act.HANG)] * 3
    with pytest.raises(DeadlinePassed):
        await client.embed(["a", "b", "c"], timeout=0.2)
    await gateway.idle()


@pytest.mark.parametrize(
    ("sampling", "changes", "field"),
    [
        (None, {"beams": {"width": 2}}, "beams"),
        (None, {"n": -1}, "n"),
        (None, {"n": 0}, "n"),
        (None, {"n": "2"}, "n"),
        (SamplingParams(max_tokens=2), {"beams": BeamParams(2, 3)}, "max_tokens"),
        (SamplingParams(ignore_eos=True), {"beams": BeamParams(2, 3)}, "ignore_eos"),
        (SamplingParams(stop=("x",)), {"beams": BeamParams(2, 3)}, "stop"),
        (SamplingParams(bad_words=("x",)), {"beams": BeamParams(2, 3)}, "bad_words"),
        (None, {"beams": BeamParams(2, 3), "n": 3}, "n"),
    ],
)
async def test_arguments_that_contradict_a_beam_search_are_refused_by_name(client, sampling, changes, field):
    with pytest.raises(InvalidRequest) as caught:
        await client.complete("hello", sampling, **changes)
    assert caught.value.field == field


async def test_a_beam_search_may_repeat_its_limits_in_the_sampling_parameters(client):
    beams = BeamParams(2, 3, ignore_eos=True, early_stopping="never")
    found = await client.complete("hello", SamplingParams(max_tokens=3, ignore_eos=True), n=2, beams=beams)
    assert [len(sample.tokens) for sample in found] == [3, 3]
    again = await client.complete("hello", n=2, beams=beams)
    assert [sample.token_ids for sample in found] == [sample.token_ids for sample in again]
