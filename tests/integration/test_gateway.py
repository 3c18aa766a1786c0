"""A gateway in front of real worker processes: the tokens of one engine, while clients disconnect and workers exit."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest
from harness.idle import assert_workers_idle
from harness.servers.processes import RunningProcess, a_worker
from harness.servers.real_gateway import real_gateway

from kvferry.client import AsyncClient, FinishReason
from kvferry.core.hashing import BlockNamers
from kvferry.engine import LLM, SamplingParams
from kvferry.gateway.decide.config import Endpoint, FleetConfig, GatewayConfig, HttpConfig
from kvferry.gateway.decide.routing.cached_prefix import prefix_key
from kvferry.gateway.decide.routing.prefix_hash import PrefixHash
from kvferry.gateway.decide.routing.routes import RouteRequest
from kvferry.gateway.gateway import Gateway

_PROMPT = [(11 * i) % 200 for i in range(70)]
_DRAWN = SamplingParams(temperature=1.0, top_p=0.9, seed=77, max_tokens=300, ignore_eos=True)


def listening_address(worker: RunningProcess, name: str) -> str:
    return str(worker.events["listening"][name])


@dataclass
class Stack:
    """A gateway and a client of it."""

    gateway: Gateway
    client: AsyncClient

    async def tokens(self, sampling: SamplingParams, prompt: list[int] | None = None) -> list[int]:
        (whole,) = await self.client.complete(prompt or _PROMPT, sampling, timeout=60)
        return whole.token_ids


@asynccontextmanager
async def a_stack(prefill: list[RunningProcess], decode: list[RunningProcess]) -> AsyncIterator[Stack]:
    def endpoints(workers: list[RunningProcess]) -> tuple[Endpoint, ...]:
        return tuple(Endpoint(listening_address(w, "grpc"), listening_address(w, "admin")) for w in workers)

    config = GatewayConfig(
        fleet=FleetConfig(prefill=endpoints(prefill), decode=endpoints(decode), status_interval_seconds=0.05),
        http=HttpConfig(address="127.0.0.1:0"),
        grpc_address="127.0.0.1:0",
    )
    async with real_gateway(config) as gateway, AsyncClient(gateway.listening.grpc) as client:
        yield Stack(gateway, client)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", dtype="float32", kv_memory=16 << 20)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[int]:
    return list(llm.generate([_PROMPT], _DRAWN)[0].token_ids)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[RunningProcess, RunningProcess]]:
    with a_worker("prefill", "--connector", "shm") as p, a_worker("decode", "--connector", "shm") as d:
        yield p, d


@pytest.fixture
async def stack(pair: tuple[RunningProcess, RunningProcess]) -> AsyncIterator[Stack]:
    async with a_stack([pair[0]], [pair[1]]) as running:
        yield running
        await asyncio.wait_for(running.gateway.dispatcher.wait_idle(), 20)
    # The limit is far below the 10 s after which an offer expires, so unused offers must have been released.
    await asyncio.to_thread(assert_workers_idle, [listening_address(w, "admin") for w in pair], within_seconds=4.0)


async def test_tokens_are_those_of_one_engine(stack, expected):
    (whole,) = await stack.client.complete(_PROMPT, _DRAWN)
    assert whole.token_ids == expected
    assert whole.finish_reason is FinishReason.LENGTH
    assert whole.timing.handoff_outcome in ("fetched", "local")


async def test_concurrent_samples_are_those_of_one_engine(stack, expected):
    first, second = await stack.client.complete(_PROMPT, _DRAWN, n=2)
    assert first.token_ids == expected
    assert second.token_ids != expected


async def test_parameters_mean_the_same_over_http_and_grpc_as_in_one_engine(stack, llm):
    text = "It was the best of times, it was the worst of times"
    fields = {
        "max_tokens": 40,
        "min_tokens": 4,
        "seed": 3,
        "typical_p": 0.9,
        "allowed_token_ids": [32, *range(97, 123)],
        "bad_words": ["e", "th"],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "speculation": False,
        "truncate_prompt_tokens": 30,
        "logprobs": 1,
        "prompt_logprobs": 2,
    }
    free = llm.generate([text], sampling_of(fields))[0].text
    assert "e" not in free
    assert "th" not in free
    fields["stop"] = [free[12:15]]
    (alone,) = llm.generate([text], sampling_of(fields))
    assert (alone.text, alone.stop_reason) == (free[:15], free[12:15])
    (called,) = await stack.client.complete(text, sampling_of(fields))
    assert (called.text, called.stop_reason) == (alone.text, alone.stop_reason)
    assert called.token_ids == list(alone.token_ids)
    async with httpx.AsyncClient(base_url=f"http://{stack.gateway.listening.http}", timeout=60) as client:
        answer = await client.post("/v1/completions", json={"prompt": text, "echo": True, **fields})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert (choice["text"], choice["stop_reason"]) == (text[-30:] + alone.text, alone.stop_reason)
    scores = [(s.logprob, s.rank) for s in alone.prompt_logprobs]
    assert [s.rank for s in called.prompt_logprobs] == [rank for _, rank in scores]
    own = [
        (entry[str(byte)], byte) for entry, byte in zip(choice["prompt_logprobs"][1:], text[-29:].encode(), strict=True)
    ]
    assert [(entry["logprob"], entry["rank"]) for entry, _ in own] == [
        (pytest.approx(logprob, abs=1e-5), rank) for logprob, rank in scores
    ]
    assert choice["logprobs"]["token_logprobs"][1:30] == [entry["logprob"] for entry, _ in own]
    assert choice["logprobs"]["token_logprobs"][30:] == pytest.approx([t.logprob for t in alone.logprobs], abs=1e-5)


async def test_the_best_of_several_samples_is_the_one_with_the_highest_log_probability(stack):
    fields = {"prompt": "a ferry", "max_tokens": 12, "seed": 8, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=f"http://{stack.gateway.listening.http}", timeout=60) as client:
        every = (await client.post("/v1/completions", json={**fields, "n": 4, "logprobs": 0})).json()["choices"]
        best = (await client.post("/v1/completions", json={**fields, "n": 2, "best_of": 4})).json()["choices"]
    ranked = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [choice["text"] for choice in best] == [choice["text"] for choice in ranked[:2]]
    assert [choice["logprobs"] for choice in best] == [None, None]


def sampling_of(fields):
    """Return sampling parameters from the fields of an HTTP request."""
    return SamplingParams(**{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()})


async def test_a_stop_string_frees_the_workers_early(stack):
    (free,) = await stack.client.complete("hello", _DRAWN)
    stop = free.text[8:11]
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=77, max_tokens=300, ignore_eos=True, stop=(stop,))
    (stopped,) = await stack.client.complete("hello", params)
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason is FinishReason.STOP


async def test_clients_that_leave_at_any_moment_leave_no_state(stack, expected):
    dice = random.Random(5)

    async def leave(after_tokens: int) -> None:
        stream = stack.client.generate(_PROMPT, _DRAWN)
        async with aclosing(stream) as chunks:
            for _ in range(after_tokens):
                await anext(chunks)

    async def leave_while_waiting(rounds: int) -> None:
        task = asyncio.create_task(stack.tokens(_DRAWN))
        for _ in range(rounds):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for _ in range(4):
        await asyncio.gather(
            *(leave(dice.choice([1, 1, 2, 3, 10])) for _ in range(4)),
            *(leave_while_waiting(dice.randrange(400)) for _ in range(4)),
        )
    assert await stack.tokens(_DRAWN) == expected


def belongs_to(prompt: list[int], address: str, stack: Stack) -> bool:
    key = prefix_key(BlockNamers(b""), "", prompt, 4)
    found = PrefixHash(1.25).one(RouteRequest(key), stack.gateway.fleet.candidates().decode)
    return found is not None and found.replica.address == address


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_stream_survives_its_decode_worker(pair, llm, number):
    """The worker is killed, or terminated with less drain time than the stream needs."""
    p, survivor = pair
    with a_worker("decode", "--connector", "shm", "--drain-seconds", "0.001") as victim:
        async with a_stack([p], [survivor, victim]) as stack:
            prompts = ([seed, *_PROMPT] for seed in range(200))
            prompt = next(found for found in prompts if belongs_to(found, listening_address(victim, "grpc"), stack))
            tokens: list[int] = []
            chunk = None
            async with aclosing(stack.client.generate(prompt, _DRAWN, timeout=60)) as chunks:
                async for chunk in chunks:
                    tokens += [token.token_id for token in chunk.tokens]
                    if len(tokens) > 5 and victim.process.poll() is None:
                        status = await asyncio.to_thread(victim.stop, number)
                        assert status == (0 if number == signal.SIGTERM else -number)
            assert tokens == list(llm.generate([prompt], _DRAWN)[0].token_ids)
            assert chunk is not None
            assert chunk.timing is not None
            assert chunk.timing.resumed == 1
            await asyncio.wait_for(stack.gateway.dispatcher.wait_idle(), 20)
    await asyncio.to_thread(assert_workers_idle, [listening_address(w, "admin") for w in pair])
