"""Requests through workers on the stand-in device, each compared with the tokens of one engine."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness.device.late_device import DeviceLost, LateRunner, late_pages
from harness.device.units import RunningUnit, worker_units
from harness.idle import assert_workers_idle
from harness.servers.worker_channel import worker_channel
from kvferry.core.hashing import cache_scope
from kvferry.core.ids import AdapterId
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine import LLM, SamplingParams
from kvferry.engine.execute.gpu.host_mirror import HostMirror
from kvferry.rpc.wire import sampling_to_wire
from kvferry.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

SECONDS = 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(7 * i + 13 * seed + length) % 200 for i in range(length)]


def generate(
    prefill: RunningUnit, decode: RunningUnit, name: str, prompt: list[int], sampling: SamplingParams, **more: Any
) -> tuple[list[int], decode_pb2.DecodeResponse, list[decode_pb2.DecodeResponse]]:
    """Return the tokens, the first and all messages of a request through a prefill and a decode worker."""
    with worker_channel(prefill.address) as to_prefill, worker_channel(decode.address) as to_decode:
        first = prefill_pb2_grpc.PrefillStub(to_prefill).Run(
            prefill_pb2.PrefillRequest(
                request_id=name, token_ids=prompt, sampling=sampling_to_wire(sampling), offer=True, **more
            ),
            timeout=SECONDS,
        )
        request = decode_pb2.DecodeRequest(
            request_id=name,
            token_ids=[*prompt, first.first_token.id],
            num_generated=1,
            sampling=sampling_to_wire(sampling),
            ticket=first.ticket,
            attempt=1,
            want_cached_ticket=True,
        )
        messages = list(decode_pb2_grpc.DecodeStub(to_decode).Run(request, timeout=SECONDS))
    tokens = [first.first_token.id, *(token.id for message in messages for token in message.tokens)]
    return tokens, messages[0], messages


CHUNKED: dict[str, Any] = {"limits": SchedulerLimits(max_chunk_tokens=32)}
"""Chunks without a sampled row: the host does not wait for these."""


def hand_off(one_engine: LLM, connector: str, **settings: Any) -> None:
    with worker_units(late_pages, "prefill", "decode", connector=connector, engine=CHUNKED, **settings) as units:
        prefill, decode = units
        for number, (length, sampling) in enumerate([(1, GREEDY), (33, GREEDY), (150, DRAWN), (33, GREEDY)]):
            prompt = prompt_of(length)
            tokens, first, _ = generate(prefill, decode, f"r{number}", prompt, sampling)
            assert tokens == list(one_engine.generate([prompt], sampling)[0].token_ids)
            assert first.handoff.outcome == decode_pb2.Handoff.OUTCOME_FETCHED
        assert_workers_idle([prefill.admin, decode.admin])


def prior_turn(one_engine: LLM) -> None:
    with worker_units(late_pages, "prefill", "decode", connector="shm", engine=CHUNKED) as (prefill, decode):
        prompt = prompt_of(60)
        tokens, _, messages = generate(prefill, decode, "a", prompt, GREEDY)
        kept = messages[-1]
        assert kept.num_cached_ticket_tokens == 64
        following = [*prompt, *tokens, *prompt_of(40, seed=3)]
        again, first, _ = generate(prefill, decode, "b", following, GREEDY, prior_turn_ticket=kept.cached_ticket)
        assert again == list(one_engine.generate([following], GREEDY)[0].token_ids)
        assert first.handoff.outcome == decode_pb2.Handoff.OUTCOME_FETCHED
        assert_workers_idle([prefill.admin, decode.admin])


def prefetch(one_engine: LLM, *, num_followed: int = 1) -> None:
    """Let the decode worker follow long prompts, and compare the tokens. A prompt may be computed before it is
    followed; prompts are sent until some were followed."""
    with (
        worker_units(late_pages, "prefill", "decode", connector="shm", engine=CHUNKED) as (prefill, decode),
        worker_channel(decode.address) as channel,
        ThreadPoolExecutor(1) as aside,
    ):
        for number in range(12 * num_followed):  # evaluated once
            prompt, name = prompt_of(1500, seed=number), f"{number:032d}"
            request = decode_pb2.PrefetchKvRequest(
                request_id=name,
                token_ids=prompt,
                ticket_id=name,
                prefill=prefill.unit.context.identity,
                prefill_address=prefill.address,
            )
            fetched = aside.submit(decode_pb2_grpc.DecodeStub(channel).PrefetchKv, request, timeout=SECONDS)
            tokens, _, _ = generate(prefill, decode, name, prompt, GREEDY, ticket_id=name)
            assert tokens == list(one_engine.generate([prompt], GREEDY)[0].token_ids)
            num_followed -= fetched.result(SECONDS).num_blocks > 0
            if num_followed == 0:
                break
        else:
            pytest.fail("no block was fetched while its prompt was computed")
        assert_workers_idle([prefill.admin, decode.admin])


def evicted(one_engine: LLM, url: str) -> None:
    """Send more prompts than the pages hold, twice, to a worker with a tier."""
    engine = {**CHUNKED, "kv_memory": 1 << 20}
    with worker_units(late_pages, "both", connector="shm", tiers=(url,), engine=engine) as (worker,):
        prompts = [prompt_of(400, seed=n) for n in range(6)]
        sampling = sampling_to_wire(GREEDY)
        outcomes = []
        with worker_channel(worker.address) as channel:
            stub = decode_pb2_grpc.DecodeStub(channel)
            for name, prompt in [(f"r{turn}-{n}", prompt) for turn in range(2) for n, prompt in enumerate(prompts)]:
                request = decode_pb2.DecodeRequest(request_id=name, token_ids=prompt, sampling=sampling)
                messages = list(stub.Run(request, timeout=SECONDS))
                tokens = [token.id for message in messages for token in message.tokens]
                assert tokens == list(one_engine.generate([prompt], GREEDY)[0].token_ids)
                outcomes.append(messages[0].handoff.outcome)
        assert decode_pb2.Handoff.OUTCOME_TIER in outcomes[len(prompts) :]
        assert_workers_idle([worker.admin])


def overlap(one_engine: LLM) -> None:
    """Load, store and hand over 1,000 pages of each of three prompts alongside a running stream, and compare the trace
    on the virtual clock with one in which steps follow each other at once."""
    engine = {**CHUNKED, "block_tokens": 1, "kv_memory": 16 << 20}
    settings: dict[str, Any] = {"connector": "shm", "engine": engine, "tiers": ("dram://?size=64MiB",)}
    with (
        worker_units(late_pages, "prefill", "decode", **settings) as (prefill, decode),
        worker_channel(decode.address) as channel,
        ThreadPoolExecutor(4) as aside,
    ):
        steady = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
        request = decode_pb2.DecodeRequest(
            request_id="steady", token_ids=prompt_of(20), sampling=sampling_to_wire(steady)
        )
        stream = decode_pb2_grpc.DecodeStub(channel).Run(request, timeout=SECONDS)
        next(stream)
        prompts = [prompt_of(1000, seed=seed) for seed in range(1, 4)]
        calls = [aside.submit(generate, prefill, decode, f"p{n}", p, GREEDY) for n, p in enumerate(prompts)]
        for prompt, answer in zip(prompts, calls, strict=True):
            tokens, first, _ = answer.result(SECONDS)
            assert tokens == list(one_engine.generate([prompt], GREEDY)[0].token_ids)
            assert first.handoff.outcome == decode_pb2.Handoff.OUTCOME_FETCHED
        next(stream)  # the stream was running the whole time
        for worker in (prefill, decode):
            assert isinstance(worker.runner, LateRunner)
            trace = worker.runner.trace
            assert trace.num_pages >= 3000
            assert trace.late_seconds == pytest.approx(0.0, abs=1e-6)
            if worker is decode:
                assert trace.num_pages_beside_steps >= 3000
        stream.cancel()
        assert_workers_idle([prefill.admin, decode.admin])


def lost_copies(one_engine: LLM) -> None:
    """Make every copy to the decode worker's device fail, so that the prompt is computed there."""

    def fail(blocks: Sequence[int]) -> None:
        raise DeviceLost("CUDA error: an illegal memory access was encountered")

    with worker_units(late_pages, "prefill", "decode", connector="shm", engine=CHUNKED) as (prefill, decode):
        assert isinstance(decode.mirror, HostMirror)
        decode.mirror._copies.to_device = fail  # type: ignore[method-assign]
        prompt = prompt_of(90)
        tokens, first, _ = generate(prefill, decode, "r", prompt, GREEDY)
        assert tokens == list(one_engine.generate([prompt], GREEDY)[0].token_ids)
        assert first.handoff.outcome == decode_pb2.Handoff.OUTCOME_FAILED
        assert "illegal memory access" in first.handoff.reason
        assert_workers_idle([prefill.admin, decode.admin])


def features(one_engine: LLM, adapters: Mapping[str, str]) -> None:
    """Send prompts with and without adapters, twice and at once, to a worker with draft tokens, a tier and so few pages
    that sequences are preempted."""
    engine = {
        **CHUNKED,
        "kv_memory": 640 << 10,
        "speculation": "suffix?k=4",
        "adapters": tuple(adapters.items()),
    }
    with (
        worker_units(late_pages, "both", connector="shm", tiers=("dram://?size=8MiB",), engine=engine) as (worker,),
        worker_channel(worker.address) as channel,
        ThreadPoolExecutor(16) as aside,
    ):
        stub = decode_pb2_grpc.DecodeStub(channel)
        sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        known = {one.name: one for one in worker.unit.status().adapters}
        scopes = {name: cache_scope("", "", AdapterId(name, one.digest)) for name, one in known.items()}

        def tokens_of(name: str, number: int) -> list[int]:
            request = decode_pb2.DecodeRequest(
                request_id=f"{name}-{number}",
                token_ids=prompt_of(150, seed=number % 6),
                sampling=sampling_to_wire(sampling),
                adapter=known.get(name),
                scope=scopes.get(name, ""),
            )
            return [token.id for message in stub.Run(request, timeout=SECONDS) for token in message.tokens]

        cases = [(name, number) for number in range(12) for name in ("", *adapters)]
        answers = [aside.submit(tokens_of, name, number) for name, number in cases]
        for (name, number), answer in zip(cases, answers, strict=True):
            (right,) = one_engine.generate([prompt_of(150, seed=number % 6)], sampling, model=name)
            assert answer.result(SECONDS) == list(right.token_ids), (name, number)
        assert worker.unit.engine.scheduler.num_preemptions
        assert worker.unit.engine.speculation is not None
        assert worker.unit.engine.speculation.counts.num_accepted_tokens
        assert_workers_idle([worker.admin])


def thousand(one_engine: LLM, connector: str, tier: str) -> None:
    """Send 1,000 requests, 16 at once, through a prefill and a decode worker with a tier."""
    distinct = [(prompt_of(17 + 23 * n, seed=n), GREEDY if n % 2 else DRAWN) for n in range(10)]
    right = [list(one_engine.generate([prompt], sampling)[0].token_ids) for prompt, sampling in distinct]
    settings: dict[str, Any] = {"connector": connector, "tiers": (tier,) if tier else (), "engine": CHUNKED}
    with (
        worker_units(late_pages, "prefill", "decode", **settings) as (prefill, decode),
        ThreadPoolExecutor(16) as aside,
    ):
        calls = [aside.submit(generate, prefill, decode, f"r{n}", *distinct[n % 10]) for n in range(1000)]
        for number, answer in enumerate(calls):
            assert answer.result(10 * SECONDS)[0] == right[number % 10]
        assert_workers_idle([prefill.admin, decode.admin])
