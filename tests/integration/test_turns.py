"""The next turn of a conversation: the prefill worker reads KV that the decode worker generated and still caches."""

from collections.abc import Iterator

import httpx
import psutil
import pytest
from harness.idle import assert_workers_idle
from harness.servers.processes import RunningProcess, connector_flags, running

from kvferry.client import Client
from kvferry.client.messages import Completion
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM

SECONDS = 60.0
FIRST = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
NEXT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
FLAGS = ("--model", "tiny", "--dtype", "float32", "--threads", "1", "--load-policy", "always", "--log-level", "error")
ADDRESSES = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json")


@pytest.fixture(scope="module")
def one_engine() -> LLM:
    return LLM("tiny", dtype="float32", kv_memory=16 << 20)


@pytest.fixture(params=["shm", "nixl", "tcp", "tcp-encrypted", "memory"])
def stack(request: pytest.FixtureRequest) -> Iterator[RunningProcess]:
    # 48 pages: a few other prompts evict a conversation.
    with running(
        "up", *FLAGS, *ADDRESSES, "--kv-memory", "384KiB", "--max-model-len", "768", *connector_flags(request.param)
    ) as process:
        process.wait_for("ready")
        yield process
        admin = process.events["ready"]["workers"]
        assert isinstance(admin, dict)
        assert_workers_idle(admin.values())
        assert process.stop() == 0


def opening(number: int) -> list[int]:
    return [(number * 17 + 5 * i) % 199 for i in range(100)]


def a_turn(client: Client, one_engine: LLM, prompt: list[int], sampling: SamplingParams) -> Completion:
    (whole,) = client.complete(prompt, sampling)
    assert whole.token_ids == list(one_engine.generate([prompt], sampling)[0].token_ids)
    return whole


def test_after_a_reset_of_the_caches_no_block_is_read(stack: RunningProcess, one_engine: LLM) -> None:
    with Client(str(stack.events["ready"]["grpc"]), timeout=SECONDS) as client:
        prompt = opening(1)
        prompt += [*a_turn(client, one_engine, prompt, FIRST).token_ids, 7, 8, 9]
        reset = httpx.post(f"http://{stack.events['ready']['admin']}/reset_prefix_cache", timeout=SECONDS)
        assert [worker["num_blocks"] > 0 for worker in reset.json()["workers"]] == [True, True]
        again = a_turn(client, one_engine, prompt, NEXT)
        assert again.usage.cached_tokens == 0
        assert [report.blocks_loaded for report in again.timing.kv if report.worker_id.startswith("prefill")] == []


def test_the_answer_of_the_last_turn_is_read_back(stack: RunningProcess, one_engine: LLM) -> None:
    with Client(str(stack.events["ready"]["grpc"]), timeout=SECONDS) as client:
        prompt = opening(1)
        prompt += [*a_turn(client, one_engine, prompt, FIRST).token_ids, 7, 8, 9]
        whole = a_turn(client, one_engine, prompt, NEXT)
        prefill = whole.timing.kv[0]
        assert prefill.source == "peer"
        assert prefill.first_token == 96, "the prefill worker still caches the prompt's six blocks"
        assert (prefill.blocks_loaded, prefill.failure) == (4, ""), "the four blocks up to token 160 of 170"
        assert whole.usage.cached_tokens == 160, "the prefix cache's and the loaded ones"


def test_blocks_that_were_reused_are_computed_again(stack: RunningProcess, one_engine: LLM) -> None:
    with Client(str(stack.events["ready"]["grpc"]), timeout=SECONDS) as client:
        prompt = opening(2)
        prompt += [*a_turn(client, one_engine, prompt, FIRST).token_ids, 7, 8, 9]
        for other in range(10, 18):
            a_turn(client, one_engine, opening(other), NEXT)
        prefill = a_turn(client, one_engine, prompt, NEXT).timing.kv[0]
        assert prefill.blocks_loaded == 0
        assert "reused" in prefill.failure


def test_a_worker_that_was_killed_between_turns_is_not_waited_for(one_engine: LLM) -> None:
    with running(
        "up", *FLAGS, *ADDRESSES, "--kv-memory", "384KiB", "--max-model-len", "768", "--decode", "2"
    ) as process:
        with Client(str(process.wait_for("ready")["grpc"]), timeout=SECONDS) as client:
            prompt = opening(3)
            first = a_turn(client, one_engine, prompt, FIRST)
            port = int(first.timing.decode_worker.rpartition(":")[2])
            children = psutil.Process(process.process.pid).children()
            (decode,) = [c for c in children if port in {n.laddr.port for n in c.net_connections() if not n.raddr}]
            decode.kill()
            decode.wait(SECONDS)
            whole = a_turn(client, one_engine, [*prompt, *first.token_ids, 7, 8, 9], NEXT)
            reports = [r for r in whole.timing.kv if r.worker_id == whole.timing.prefill_worker]
            assert all(r.blocks_loaded == 0 for r in reports), "the worker with these blocks is gone"
        assert process.stop() == 0
