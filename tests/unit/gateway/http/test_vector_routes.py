"""Embeddings, scores, rerankings and token ids over HTTP: OpenAI's client, vLLM's shapes, and refusals by name."""

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from harness.fakes.byte_model import BOS, HIDDEN_SIZE
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway
from harness.fakes.scripted_tokens import vector_of
from harness.fakes.scripted_worker import Act, Fault

from kvferry.core.errors import InvalidRequest
from kvferry.core.inference.pooling import Pooling, PoolingParams
from kvferry.gateway.decide.config import HttpConfig
from kvferry.serving.embedding import MAX_RUNNING_INPUTS
from kvferry.text.requests.pooling import cosine

PLAIN = PoolingParams()


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway() as running:
        yield running


@pytest.fixture
async def client(gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as opened:
        yield opened


@pytest.fixture
async def http(gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as opened:
        yield opened


def ids(text: str) -> list[int]:
    return [BOS, *text.encode()]


@pytest.mark.parametrize("form", ["float", "base64"])
async def test_the_official_client_gets_a_vector_for_each_input(client, form):
    texts = ["hello", "hé llo", "x" * 300]
    answer = await client.embeddings.create(model="bytes", input=texts, encoding_format=form, user="someone")
    assert [item.index for item in answer.data] == [0, 1, 2]
    for item, text in zip(answer.data, texts, strict=True):
        value: Any = item.embedding
        if form == "base64":
            value = np.frombuffer(base64.b64decode(value), "<f4")
        assert np.array_equal(np.array(value, np.float32), vector_of(ids(text), PLAIN))
    total = sum(len(ids(text)) for text in texts)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (total, total)
    assert (answer.object, answer.model, answer.data[0].object) == ("list", "bytes", "embedding")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a", [ids("a")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (["a"], [ids("a")]),
    ],
)
async def test_each_form_of_input(client, given, expected):
    answer = await client.embeddings.create(model="bytes", input=given)  # OpenAI's client requests base64 by default
    assert len(answer.data) == len(expected)
    for item, tokens in zip(answer.data, expected, strict=True):
        assert np.array_equal(np.array(item.embedding, np.float32), vector_of(tokens, PLAIN))


async def test_the_extensions_reach_the_worker(http, gateway):
    body = {"input": "abc", "pooling": "mean", "normalize": False, "dimensions": 3, "priority": -2, "cache_salt": "s"}
    answer = (await http.post("/v1/embeddings", json=body)).json()
    wanted = vector_of(ids("abc"), PoolingParams(Pooling.MEAN, normalize=False, dimensions=3))
    assert np.array_equal(np.array(answer["data"][0]["embedding"], np.float32), wanted)
    (pooling_request,) = gateway.workers.prefill[0].pools
    assert pooling_request.priority == -2
    assert pooling_request.scope != ""


@pytest.mark.parametrize(
    ("path", "body", "field", "says"),
    [
        ("/v1/embeddings", {}, "input", "input is missing"),
        ("/v1/embeddings", {"input": []}, "input", "it must have 1 to 1024"),
        ("/v1/embeddings", {"input": ["a"] * 1025}, "input", "it must have 1 to 1024"),
        ("/v1/embeddings", {"input": None}, "input", "null"),
        ("/v1/embeddings", {"input": [1.5]}, "input.0", "1.5"),
        ("/v1/embeddings", {"input": [True]}, "input.0", "true"),
        ("/v1/embeddings", {"input": ["a", 3]}, "input.1", "3"),
        ("/v1/embeddings", {"input": [[1], "a"]}, "input.1", "token ids"),
        ("/v1/embeddings", {"input": [[1], []]}, "input.1", "empty"),
        ("/v1/embeddings", {"input": [1, 258]}, "input", "ids 0 to 257"),
        ("/v1/embeddings", {"input": [1, -1]}, "input", "ids 0 to 257"),
        ("/v1/embeddings", {"input": [10**30]}, "input", "more than 64 bits"),
        ("/v1/embeddings", {"input": [[7] * 513, [7]]}, "input.0", "513 tokens > 512 maximum"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", f"between 1 and {HIDDEN_SIZE}"),
        ("/v1/embeddings", {"input": "a", "dimensions": HIDDEN_SIZE + 1}, "dimensions", f"between 1 and {HIDDEN_SIZE}"),
        ("/v1/embeddings", {"input": "a", "dimensions": 2.0}, "dimensions", "2.0"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ("/v1/embeddings", {"input": "a", "pooling": "max"}, "pooling", "last, mean, cls"),
        ("/v1/embeddings", {"input": "a", "priority": 1001}, "priority", "1001"),
        ("/v1/score", {"text_1": "a"}, "text_2", "missing"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "2 items and text_2 has 1"),
        ("/v1/score", {"text_1": ["a"] * 513, "text_2": ["c"] * 513}, "text_1", "it must have 1 to 512"),
        ("/v1/score", {"text_1": "a", "text_2": [1]}, "text_2.0", "must be a string"),
        (
            "/v1/score",
            {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 4},
            "truncate_prompt_tokens",
            "not supported",
        ),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "it must have 1 to 1023"),
        ("/v1/rerank", {"query": "a", "documents": "b"}, "documents", "must be a list"),
        (
            "/v1/rerank",
            {"query": "a", "documents": [{"image": "b"}]},
            "documents.0",
            "a string, or an object with only the field text",
        ),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "-1"),
        (
            "/v1/rerank",
            {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9},
            "max_tokens_per_doc",
            "not supported",
        ),
        ("/tokenize", {}, "prompt", "either prompt or messages"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "array"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt", "either"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages.0.content", ""),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt", "with prompt"),
        ("/tokenize", {"messages": [], "chat_template": "x"}, "chat_template", "not supported"),
        ("/detokenize", {"tokens": "a"}, "tokens", "list of token ids"),
        ("/detokenize", {"tokens": [300]}, "tokens", "ids 0 to 257"),
        ("/detokenize", {"tokens": [1] * 3000}, "prompt", "2999 tokens"),
    ],
)
async def test_refusals_name_the_field(http, path, body, field, says):
    answer = await http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == field
    assert says in error["message"]


async def test_malformed_bodies_and_unknown_models_are_refused(http):
    for body, status in ((b"[1]", 400), (b"{", 400), (b'{"input": NaN}', 400), (b'{"input": "\\ud800"}', 400)):
        answer = await http.post("/v1/embeddings", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status, body
    assert (await http.post("/v1/embeddings", content=b"{}")).status_code == 415
    assert (await http.get("/v1/embeddings")).status_code == 405
    missing = await http.post("/v1/embeddings", json={"input": "a", "model": "other"})
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")
    assert (await http.post("/tokenize", json={"prompt": "a", "model": ""})).status_code == 404


async def test_scores_of_one_text_with_several_and_of_pairs(http):
    def similarity(a: str, b: str) -> float:
        return cosine(vector_of(ids(a), PLAIN), vector_of(ids(b), PLAIN))

    one = (await http.post("/v1/score", json={"text_1": "abc", "text_2": ["abc", "xyz"]})).json()
    assert [item["score"] for item in one["data"]] == pytest.approx([1.0, similarity("abc", "xyz")])
    assert [item["index"] for item in one["data"]] == [0, 1]
    assert one["usage"]["total_tokens"] == 12
    pairs = (await http.post("/score", json={"model": "bytes", "text_1": ["a", "b"], "text_2": ["b", "b"]})).json()
    assert [item["score"] for item in pairs["data"]] == pytest.approx([similarity("a", "b"), 1.0])
    assert (pairs["object"], pairs["model"], pairs["data"][0]["object"]) == ("list", "bytes", "score")


async def test_documents_are_ranked_by_relevance(http):
    documents = ["xyz", "abc", {"text": "abd"}, "abc"]
    body: dict[str, Any] = {"query": "abc", "documents": documents}
    answer = (await http.post("/v1/rerank", json=body)).json()
    results = answer["results"]
    assert [item["index"] for item in results[:2]] == [1, 3], "ties keep the order of the documents"
    assert results[0]["document"] == {"text": "abc"}
    assert [item["relevance_score"] for item in results] == sorted(
        (i["relevance_score"] for i in results), reverse=True
    )
    assert len(results) == 4
    short = (await http.post("/rerank", json=body | {"top_n": 1, "return_documents": False})).json()
    assert [item.keys() for item in short["results"]] == [{"index", "relevance_score"}]
    assert answer["usage"]["total_tokens"] == 20


async def test_texts_and_conversations_have_token_ids(http):
    answer = (await http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
    assert answer == {
        "count": 4,
        "max_model_len": 512,
        "tokens": ids("hé"),
        "token_strs": ["", "h", "\ufffd", "\ufffd"],
    }
    plain = (await http.post("/tokenize", json={"prompt": "", "add_special_tokens": False})).json()
    assert (plain["tokens"], plain["token_strs"]) == ([], None)
    chat = (await http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()
    text = (await http.post("/detokenize", json={"tokens": chat["tokens"]})).json()
    assert text == {"prompt": "<user>hi<assistant>"}


async def test_many_inputs_are_computed_a_few_at_a_time(http, gateway):
    worker = gateway.workers.prefill[0]
    running, most, is_full = 0, 0, asyncio.Event()

    async def step() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == MAX_RUNNING_INPUTS:
            is_full.set()
        await is_full.wait()
        running -= 1

    worker.step = step
    texts = [f"text {number}" for number in range(300)]
    answer = await http.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"})
    assert [item["index"] for item in answer.json()["data"]] == list(range(300))
    last = np.frombuffer(base64.b64decode(answer.json()["data"][-1]["embedding"]), "<f4")
    assert np.array_equal(last, vector_of(ids(texts[-1]), PLAIN))
    assert most == MAX_RUNNING_INPUTS


async def test_a_client_that_leaves_ends_the_worker_s_calls(gateway):
    worker = gateway.workers.prefill[0]
    for _ in range(40):
        worker.faults["pool"].append(Fault(Act.HANG))
    async with httpx.AsyncClient(base_url=gateway.url) as leaving:
        task = asyncio.create_task(leaving.post("/v1/embeddings", json={"input": ["a"] * 40}))
        await worker.fault_reached.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await gateway.idle()
    assert len(worker.pools) <= 16


async def test_an_input_that_fails_ends_the_request_and_the_others(gateway, http):
    worker = gateway.workers.prefill[0]
    worker.faults["pool"] += [Fault(Act.HANG), Fault(Act.FAIL, error=InvalidRequest("too odd", field="token_ids"))]
    answer = await http.post("/v1/embeddings", json={"input": ["a", "b", "c"]})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "too odd")
    await gateway.idle()


async def test_keys_are_checked_and_tenants_kept_apart(tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("first-secret one\nsecond-secret two\n")
    keys.chmod(0o600)
    async with (
        scripted_gateway(http=HttpConfig(address="127.0.0.1:0", api_keys_file=keys)) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as http,
    ):
        for path, body in (("/v1/embeddings", {"input": "a"}), ("/tokenize", {"prompt": "a"})):
            assert (await http.post(path, json=body)).status_code == 401
            headers = {"authorization": "Bearer second-secret"}
            assert (await http.post(path, json=body, headers=headers)).status_code == 200
        assert [pooling_request.scope for pooling_request in gateway.workers.prefill[0].pools] == ["two"]


async def test_a_large_body_is_refused():
    config = HttpConfig(address="127.0.0.1:0", max_body_bytes=1000)
    async with (
        scripted_gateway(http=config) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as http,
    ):
        assert (await http.post("/v1/embeddings", json={"input": "a" * 2000})).status_code == 413
