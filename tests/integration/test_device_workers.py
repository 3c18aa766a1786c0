"""Workers whose pages are on a device: hand-off over each transport, tiers, prefetch and prior turns.

The device is a stand-in (`harness.device`) on which every missing order of copies and steps shows as a NaN or as a
wrong token.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from harness.device.late_device import LateStream, late_pages
from harness.device.units import RunningUnit, worker_units
from harness.idle import assert_workers_idle
from harness.servers.worker_channel import worker_channel

from kvferry.engine import LLM, SamplingParams
from kvferry.engine.build import engine_pages
from kvferry.engine.gpu.device_mirror import DeviceMirror
from kvferry.engine.plan.step_budget import SchedulerLimits
from kvferry.kernels.host_copies import HostCopies
from kvferry.kv.fetcher import Fetcher
from kvferry.kv.pages.digests import page_digests
from kvferry.rpc.wire import sampling_to_wire
from kvferry.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from kvferry.workers.handoff.page_publisher import PagePublisher

SECONDS = 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def one_engine() -> LLM:
    return LLM("tiny", dtype="float32", kernels="torch", kv_bytes=16 << 20)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(7 * i + 13 * seed + length) % 200 for i in range(length)]


def generate(
    prefill: RunningUnit, decode: RunningUnit, name: str, prompt: list[int], sampling: SamplingParams, **more: object
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


CHUNKED = {"limits": SchedulerLimits(max_chunk_tokens=32)}
"""Chunks without a sampled row: the host does not wait for these."""


def hand_off(one_engine: LLM, connector: str, **settings: object) -> None:
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


def prefetch(one_engine: LLM) -> None:
    """Let the decode worker follow long prompts, and compare the tokens."""
    with (
        worker_units(late_pages, "prefill", "decode", connector="shm", engine=CHUNKED) as (prefill, decode),
        worker_channel(decode.address) as channel,
        ThreadPoolExecutor(1) as aside,
    ):
        for number in range(12):
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
            if fetched.result(SECONDS).num_blocks:  # a prompt may be computed before it is followed
                break
        else:
            pytest.fail("no block was fetched while its prompt was computed")
        assert_workers_idle([prefill.admin, decode.admin])


def evicted(one_engine: LLM, url: str) -> None:
    """Send more prompts than the pages hold, twice, to a worker with a tier."""
    engine = {**CHUNKED, "kv_bytes": 1 << 20}
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


@pytest.mark.parametrize("connector", ["shm", "tcp", "nixl"])
def test_tokens_over_each_transport_are_those_of_one_engine(one_engine: LLM, connector: str) -> None:
    hand_off(one_engine, connector)


def test_digests_are_those_of_the_copied_pages(one_engine: LLM) -> None:
    hand_off(one_engine, "tcp", verify_kv="digest")


def test_a_prior_turn_is_read_from_the_decode_worker(one_engine: LLM) -> None:
    prior_turn(one_engine)


def test_a_prompt_is_followed_while_it_is_computed(one_engine: LLM) -> None:
    prefetch(one_engine)


@pytest.mark.parametrize("tier", ["dram", "disk"])
def test_evicted_blocks_come_back_from_each_tier(one_engine: LLM, tier: str, tmp_path) -> None:
    evicted(one_engine, f"disk://{tmp_path}?size=16MiB" if tier == "disk" else "dram://?size=8MiB")


@pytest.mark.parametrize("device", ["prefill", "decode"])
def test_one_side_on_a_device_and_the_other_in_host_memory(one_engine: LLM, device: str) -> None:
    kinds = iter([late_pages, engine_pages] if device == "prefill" else [engine_pages, late_pages])

    def each(loaded, memory):
        return next(kinds)(loaded, memory)

    with worker_units(each, "prefill", "decode", connector="shm") as (prefill, decode):
        prompt = prompt_of(70)
        tokens, first, _ = generate(prefill, decode, "r", prompt, GREEDY)
        assert first.handoff.outcome == decode_pb2.Handoff.OUTCOME_FETCHED
        assert tokens == list(one_engine.generate([prompt], GREEDY)[0].token_ids)


# -- what the copies and their order are for ---------------------------------------------------------------------------


def nothing(*_, **__) -> None:
    return None


def publish_only_in(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one service name pages to peers without publishing them."""
    real = PagePublisher.publish

    async def publish(self, blocks, epochs):
        caller = sys._getframe(1).f_code.co_filename
        return () if caller.endswith(module) else await real(self, blocks, epochs)

    monkeypatch.setattr(PagePublisher, "publish", publish)


def digests_first(self, blocks, epochs):
    found = page_digests(self._pages, self._block_bytes, blocks)
    self._mirror.to_host(blocks, epochs)
    return tuple(found)


def rows_shifted(self, target, source, blocks) -> None:
    real_copy(self, target, source, [(block + 1) % len(target) for block in blocks])


real_copy = HostCopies._copy
MUTATIONS = {
    "copies before the steps": ("prefetch", LateStream, "after_steps", nothing),
    "copies that are not waited for": ("hand_off", LateStream, "wait", nothing),
    "pages of other rows": ("hand_off", HostCopies, "_copy", rows_shifted),
    "offers before the copy": ("hand_off", "prefill.py", None, None),
    "loads without a copy": ("hand_off", Fetcher, "_why_not_copied", nothing),
    "copies to the host that are skipped": ("hand_off", DeviceMirror, "to_host", nothing),
    "digests before the copy": ("digests", PagePublisher, "_publish", digests_first),
    "prior turns before the copy": ("prior_turn", "decode.py", None, None),
    "progress before the copy": ("prefetch", "transfer.py", None, None),
    "stores before the copy": ("evicted", DeviceMirror, "to_host", nothing),
    "tier loads without a copy": ("evicted", DeviceMirror, "to_device", nothing),
    "stores before the steps": ("evicted", LateStream, "after_steps", nothing),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_copy_and_its_order_is_needed(one_engine: LLM, monkeypatch: pytest.MonkeyPatch, mutation: str) -> None:
    scenario, owner, name, replacement = MUTATIONS[mutation]
    if isinstance(owner, str):
        publish_only_in(owner, monkeypatch)
    else:
        monkeypatch.setattr(owner, name, replacement)
    scenarios = {
        "hand_off": lambda: hand_off(one_engine, "shm"),
        "digests": lambda: hand_off(one_engine, "shm", verify_kv="digest"),
        "prior_turn": lambda: prior_turn(one_engine),
        "prefetch": lambda: prefetch(one_engine),
        "evicted": lambda: evicted(one_engine, "dram://?size=8MiB"),
    }
    with pytest.raises((AssertionError, grpc.RpcError)):
        scenarios[scenario]()
