"""`kvferry up` with real processes, real clients and the real model; all resources are released at the end."""

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import jsonschema
import openai
import pytest
from harness.idle import assert_workers_idle
from harness.servers.processes import running

from kvferry.client import Client
from kvferry.core.errors import InvalidRequest, UnknownModel
from kvferry.core.sampling import FinishReason, SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine import LLM, BeamParams
from kvferry.v1 import inference_pb2, inference_pb2_grpc

MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
GREEDY_32 = SamplingParams(temperature=0.0, max_tokens=32)
SECONDS = 120.0


class Stack:
    """A running stack and its addresses."""

    def __init__(self, ready: dict[str, object]) -> None:
        self.http = f"http://{ready['http']}"
        self.gateway_admin = f"http://{ready['admin']}"
        self.grpc = str(ready["grpc"])
        admin = ready["workers"]
        assert isinstance(admin, dict)
        self.admin = [str(a) for a in admin.values()]

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.http}/v1", api_key="none", max_retries=0, timeout=SECONDS)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    flags = ("--dtype", "float32", "--kv-memory", "256MiB", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json")
    with running("up", *flags) as process:
        made = Stack(dict(process.wait_for("ready")))
        yield made
        assert_workers_idle(made.admin)
        assert process.stop() == 0


@pytest.fixture(scope="module")
def answer(stack: Stack) -> str:
    """The model's greedy answer to QUESTION."""
    reply = httpx.post(
        f"{stack.http}/v1/chat/completions",
        json={"messages": QUESTION, "temperature": 0, "max_tokens": 24},
        timeout=SECONDS,
    )
    assert reply.status_code == 200
    text: str = reply.json()["choices"][0]["message"]["content"]
    assert "Paris" in text
    return text


def test_the_openai_client_streams_the_same_text(stack: Stack, answer: str) -> None:
    with stack.openai() as client:
        whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24)  # type: ignore[arg-type]
        assert whole.choices[0].message.content == answer
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=QUESTION,  # type: ignore[arg-type]
                temperature=0,
                max_tokens=24,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


def test_two_samples_of_one_prompt(stack: Stack) -> None:
    with stack.openai() as client:
        twice = [
            client.completions.create(model=MODEL, prompt="Once upon a time", n=2, seed=5, max_tokens=12)
            for _ in range(2)
        ]
        texts = [[c.text for c in sorted(reply.choices, key=lambda c: c.index)] for reply in twice]
        assert texts[0] == texts[1], "equal seeds give equal samples"
        assert texts[0][0] != texts[0][1], "samples of one request differ"


def test_a_stop_string_cuts_the_text(stack: Stack, answer: str) -> None:
    with stack.openai() as client:
        reply = client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=24,
            stop=["Paris"],
        )
        assert reply.choices[0].message.content == answer.split("Paris")[0]
        assert reply.choices[0].finish_reason == "stop"


def test_a_client_that_disconnects_during_a_stream_leaves_no_state(stack: Stack) -> None:
    with stack.openai() as client:
        stream = client.completions.create(
            model=MODEL, prompt="Count to a thousand:", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    assert_workers_idle(stack.admin)


def test_grpc_gives_the_same_text_and_its_errors_name_the_field(stack: Stack, answer: str) -> None:
    with Client(stack.grpc, timeout=SECONDS) as client:
        chunks = list(client.generate(QUESTION, GREEDY))
        assert "".join(c.text for c in chunks) == answer
        assert chunks[-1].finish_reason is FinishReason.STOP
        assert chunks[-1].timing is not None
        assert chunks[-1].timing.handoff_outcome in {"fetched", "local"}
        with pytest.raises(InvalidRequest) as caught:
            client.complete([1] * 9000, GREEDY)
        assert "9000" in caught.value.message
        with pytest.raises(UnknownModel):
            client.complete("x", GREEDY, model="gpt-5")


def test_not_a_number_is_refused_over_grpc(stack: Stack) -> None:
    with grpc.insecure_channel(stack.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for field in ("temperature", "top_p", "min_p", "frequency_penalty"):
            request = inference_pb2.GenerateRequest(text="x", sampling={field: float("nan")})
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(request, timeout=SECONDS))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert field in str(caught.value.details())


@pytest.mark.parametrize("chunk", [512, 48])
def test_prefill_and_decode_give_the_tokens_of_one_engine(stack: Stack, chunk: int) -> None:
    """Greedy decoding in float32 with the embedded model. The reference computes the prompts in other chunks and in one
    batch.
    """
    texts = [
        "a",
        "The capital of France is",
        "Zwölf Boxkämpfer jagen Viktor über den Sylter Deich.",
        "日本語の文章",
        "1 2 3 " * 60,
    ]
    prompts = [
        *([(i * 7919 + k) % 40000 + 30 for k in range(n)] for i, n in enumerate((15, 16, 17, 31, 32, 33, 700))),
        *texts,
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=32, logprobs=1)
    alone = LLM(MODEL, dtype="float32", kv_memory=256 << 20, limits=SchedulerLimits(max_chunk_tokens=chunk))
    expected = alone.generate(prompts, sampling)
    with Client(stack.grpc, timeout=SECONDS) as client:
        for prompt, reference in zip(prompts, expected, strict=True):
            (answer,) = client.complete(prompt, GREEDY_32)
            if answer.token_ids == list(reference.token_ids):
                continue
            pairs = zip(answer.token_ids, reference.token_ids, strict=False)
            first = next(i for i, (mine, theirs) in enumerate(pairs) if mine != theirs)
            # Rounding may decide between two tokens with almost equal probability.
            best, second = (p for _, p in _top_two(alone, prompt, reference.token_ids[:first]))
            assert best - second < 2e-3, f"prompt {str(prompt)[:40]!r}: another token at {first}"


def _top_two(llm: LLM, prompt: object, so_far: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    tokens = llm.tokenizer.encode(prompt, add_special=True) if isinstance(prompt, str) else list(prompt)  # type: ignore[call-overload]
    (again,) = llm.generate([[*tokens, *so_far]], SamplingParams(temperature=0.0, max_tokens=1, logprobs=2))
    return again.logprobs[0].top


def test_a_grpc_deadline_is_kept(stack: Stack) -> None:
    with grpc.insecure_channel(stack.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(text="Count:", sampling={"max_tokens": 4000, "ignore_eos": True})
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request, timeout=1.0))
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert_workers_idle(stack.admin)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [1] * 9000}, 400, "prompt"),
        ({"prompt": [70000]}, 400, "prompt"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": 10**12}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
        ({"prompt": "x", "model": "gpt-5"}, 404, "model"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature"),
        ({"prompt": "x", "tools": [{}]}, 400, "tools"),
        ({"prompt": {"a": 1}}, 400, "prompt"),
        ({}, 400, "prompt"),
    ],
)
def test_bad_input_is_refused_by_name(stack: Stack, body: dict[str, object], status: int, param: str) -> None:
    reply = httpx.post(f"{stack.http}/v1/completions", json=body, timeout=SECONDS)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert error["param"] == param
    assert error["message"]


@pytest.mark.parametrize("body", [b"{", b'{"prompt": "x", "temperature": NaN}', b"[]", b"\xff\xfe", b""])
def test_invalid_json_is_refused(stack: Stack, body: bytes) -> None:
    reply = httpx.post(
        f"{stack.http}/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=SECONDS
    )
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.alone
def test_two_hundred_mixed_requests_with_cancellations_leave_no_state(stack: Stack) -> None:
    chance = random.Random(11)
    plans = [
        (i, chance.randint(1, 300), chance.randint(1, 24), chance.random() < 0.2, chance.randint(0, 3))
        for i in range(200)
    ]
    outcomes: list[str] = []
    guard = threading.Lock()

    def one(plan: tuple[int, int, int, bool, int]) -> None:
        i, length, most, cancelled, after = plan
        prompt = [(i * 31 + k) % 40000 + 20 for k in range(length)]
        sampling = SamplingParams(temperature=0.0 if i % 2 else 1.0, seed=i, max_tokens=most, ignore_eos=True)
        with Client(stack.grpc, timeout=SECONDS) as client:
            stream = client.generate(prompt, sampling)
            count, reason = 0, None
            for position, chunk in enumerate(stream):
                count += len(chunk.tokens)
                reason = chunk.finish_reason
                if cancelled and position >= after:
                    stream.close()
                    break
        with guard:
            outcomes.append("cancelled" if cancelled else f"{count == most} {reason}")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, plans))
    assert sorted(set(outcomes)) == ["True length", "cancelled"]
    assert_workers_idle(stack.admin)


def test_health_readiness_models_and_metrics(stack: Stack) -> None:
    assert httpx.get(f"{stack.http}/health").status_code == 200
    assert httpx.get(f"{stack.http}/ready").json()["ready"] is True
    assert [m["id"] for m in httpx.get(f"{stack.http}/v1/models").json()["data"]] == [MODEL]
    metrics = httpx.get(f"{stack.gateway_admin}/metrics").text
    assert "kvferry_" in metrics
    assert "vllm:num_requests_running" in metrics


def test_the_timing_of_a_request_is_reported(stack: Stack) -> None:
    # The prompt is long enough that a transfer of its KV is cheaper than computing it on any machine.
    body = {"prompt": "The quick brown fox jumps over the lazy dog. " * 60, "max_tokens": 4, "temperature": 0}
    timing = httpx.post(f"{stack.http}/v1/completions", json=body, timeout=SECONDS).json()["kvferry"]
    assert timing["handoff_outcome"] in {"fetched", "local"}
    assert json.dumps(timing)


def test_outputs_follow_schemas_streamed_and_whole(stack: Stack) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    asked: Any = {"model": MODEL, "messages": QUESTION, "seed": 1, "max_tokens": 200, "response_format": wanted}
    client = stack.openai()
    whole = client.chat.completions.create(**asked, n=2)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), schema)
    pieces = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**asked, stream=True)]
    assert "".join(pieces) == whole.choices[0].message.content


@pytest.mark.alone
def test_a_schema_that_never_compiles_is_refused_by_its_field(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        stack.openai().chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            extra_body={"guided_json": {"type": "integer", "multipleOf": 99999999}},
        )
    assert isinstance(caught.value.body, dict)
    assert (caught.value.body["param"], caught.value.body["code"]) == ("guided_json", "constraint_too_costly")


def test_a_beam_search_over_prefill_and_decode_workers_equals_one_engine(stack: Stack) -> None:
    one_engine = LLM(MODEL, dtype="float32", kv_memory=128 << 20)
    prompt, params = "The capital of France is", BeamParams(width=3, max_tokens=12)
    (expected,) = one_engine.beam_search([prompt], params)
    fields = {"prompt": prompt, "max_tokens": 12, "n": 2, "best_of": 3, "use_beam_search": True}
    reply = httpx.post(f"{stack.http}/v1/completions", json=fields, timeout=SECONDS)
    assert reply.status_code == 200, reply.text
    assert [choice["text"] for choice in reply.json()["choices"]] == [output.text for output in expected[:2]]
    with Client(stack.grpc, timeout=SECONDS) as client:
        found = client.complete(prompt, n=3, beams=params)
    assert [tuple(sample.token_ids) for sample in found] == [output.token_ids for output in expected]
