"""Workers whose pages are on a device: hand-off over each transport, tiers, prefetch and prior turns.

The device is a stand-in (`harness.device`) on which each missing ordering of copies and steps causes a NaN or a wrong
token.
"""

from contextlib import nullcontext
from pathlib import Path

import grpc
import pytest
from harness.device.late_device import LateRunner, late_pages
from harness.device.scenarios import (
    CHUNKED,
    GREEDY,
    SECONDS,
    evicted,
    features,
    generate,
    hand_off,
    lost_copies,
    overlap,
    prefetch,
    prior_turn,
    prompt_of,
    thousand,
)
from harness.device.units import worker_units
from harness.kernels.lora_files import write
from harness.servers.redis_server import redis_server
from harness.servers.worker_channel import worker_channel

from kvferry.engine import LLM, SamplingParams
from kvferry.engine.build import engine_pages
from kvferry.model import tiny
from kvferry.rpc.wire import sampling_to_wire
from kvferry.v1 import decode_pb2, decode_pb2_grpc


@pytest.fixture(scope="module")
def one_engine() -> LLM:
    return LLM("tiny", dtype="float32", kernels="torch", kv_memory=16 << 20)


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
def test_evicted_blocks_are_loaded_from_each_tier(one_engine: LLM, tier: str, tmp_path) -> None:
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


def test_loading_storing_and_handing_over_a_thousand_pages_delays_no_step(one_engine: LLM) -> None:
    overlap(one_engine)


def test_a_prompt_whose_copies_fail_is_computed(one_engine: LLM) -> None:
    lost_copies(one_engine)


def test_drafts_adapters_and_preemptions_on_a_device(tmp_path: Path) -> None:
    adapters = {f"a{n}": str(write(tmp_path / f"a{n}", tiny.config(), seed=n)) for n in range(2)}
    features(LLM("tiny", dtype="float32", kernels="torch", kv_memory=16 << 20, adapters=adapters), adapters)


def test_a_lost_device_ends_the_worker_with_the_cause_and_its_streams_at_once() -> None:
    failures: list[BaseException] = []
    with (
        worker_units(late_pages, "both", connector="shm", engine=CHUNKED, failures=failures) as (worker,),
        worker_channel(worker.address) as channel,
    ):
        sampling = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
        request = decode_pb2.DecodeRequest(request_id="r", token_ids=prompt_of(40), sampling=sampling_to_wire(sampling))
        stream = decode_pb2_grpc.DecodeStub(channel).Run(request, timeout=SECONDS)
        next(stream)
        assert isinstance(worker.runner, LateRunner)
        worker.runner.breaks_at = worker.runner.launched + 3
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        assert caught.value.code() == grpc.StatusCode.INTERNAL, (
            "the gateway records the failed step and continues on another worker"
        )
        assert "the step that was processing this request failed" in str(caught.value.details())
        with pytest.raises(grpc.RpcError) as refused:
            list(decode_pb2_grpc.DecodeStub(channel).Run(request, timeout=SECONDS))
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "uncorrectable ECC error" in str(failures[0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("connector", "tier"), [("shm", ""), ("tcp", ""), ("nixl", ""), ("shm", "dram"), ("shm", "disk"), ("shm", "redis")]
)
def test_a_thousand_requests_on_devices_end_idle(one_engine: LLM, connector: str, tier: str, tmp_path: Path) -> None:
    with redis_server() if tier == "redis" else nullcontext() as server:
        urls = {"dram": "dram://?size=8MiB", "disk": f"disk://{tmp_path}?size=16MiB"}
        thousand(one_engine, connector, server.tcp if server is not None else urls.get(tier, ""))
