"""Blocks of a long prompt are sent while the prompt is computed; at its end only those of the last chunk remain."""

from collections.abc import Iterator

import pytest
from harness.idle import assert_workers_idle
from harness.servers.processes import RunningProcess, connector_flags, running
from harness.servers.worker_channel import worker_channel

from kvferry.client import Client
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM
from kvferry.v1 import common_pb2, decode_pb2, decode_pb2_grpc

SECONDS = 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
FLAGS = ("--model", "tiny", "--dtype", "float32", "--threads", "1", "--load-policy", "always", "--log-level", "error")
ADDRESSES = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json")
# The longest prompt has eight chunks.
SIZES = ("--kv-memory", "4MiB", "--max-chunk-tokens", "256", "--token-budget", "256")


@pytest.fixture(params=["shm", "nixl", "tcp", "tcp-encrypted", "memory"])
def stack(request: pytest.FixtureRequest) -> Iterator[RunningProcess]:
    with running("up", *FLAGS, *ADDRESSES, *SIZES, *connector_flags(request.param)) as process:
        process.wait_for("ready")
        yield process
        admin = process.events["ready"]["workers"]
        assert isinstance(admin, dict)
        assert_workers_idle(admin.values())
        assert process.stop() == 0


def test_most_blocks_are_transferred_before_the_prompt_is_computed(stack: RunningProcess) -> None:
    engine = LLM("tiny", dtype="float32", kv_memory=16 << 20)
    with Client(str(stack.events["ready"]["grpc"]), timeout=SECONDS) as client:
        early = 0
        for number in range(12):
            prompt = [(number * 17 + 5 * i + i // 199) % 199 for i in range(1900)]
            (whole,) = client.complete(prompt, GREEDY)
            assert whole.token_ids == list(engine.generate([prompt], GREEDY)[0].token_ids)
            assert whole.timing.handoff_outcome == "fetched"
            early += 119 - whole.timing.handoff_blocks
            if early > 119:  # one prompt may be computed before its blocks are sent, because it takes little time
                return
        pytest.fail(f"only {early} of 12 x 119 blocks were prefetched")


@pytest.mark.parametrize("stack", ["shm"], indirect=True)
def test_invalid_prefetch_requests_cause_no_error_and_leave_no_state(stack: RunningProcess) -> None:
    admin = stack.events["ready"]["workers"]
    assert isinstance(admin, dict)
    with Client(str(stack.events["ready"]["grpc"]), timeout=SECONDS) as client:
        (whole,) = client.complete([1, 2, 3], GREEDY)
    with worker_channel(whole.timing.decode_worker) as channel:
        stub = decode_pb2_grpc.DecodeStub(channel)
        for address in (whole.timing.prefill_worker, "127.0.0.1:1"):
            request = decode_pb2.PrefetchKvRequest(
                request_id="r",
                token_ids=[5] * 100,
                ticket_id="0" * 32,
                prefill=common_pb2.WorkerIdentity(worker_id="w", incarnation="nobody"),
                prefill_address=address,
            )
            assert stub.PrefetchKv(request, timeout=SECONDS).num_blocks == 0
    assert_workers_idle(admin.values())
