"""Workers whose model is computed by several processes: the tokens of one process, in every family, over hand-offs
between any numbers of ranks, and with the features that share pages."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from harness.idle import assert_workers_idle
from harness.kernels.family_checkpoints import CHECKPOINTS
from harness.kernels.lora_files import write
from harness.servers.processes import a_worker, running
from harness.waiting import until
from integration.test_layouts import Fetched, a_pair

from kvferry.client import Client
from kvferry.core.errors import InvariantBroken, UsageError
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM
from kvferry.engine.execute.ranks import build_ranked
from kvferry.model import tiny

SECONDS = 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5], [7 * i % 250 for i in range(23)], [(11 * i + i * i) % 250 for i in range(130)]]
RANK = "kvferry.engine.execute.ranks.rank_process"


def ranks_of(pid: int) -> list[psutil.Process]:
    """Return the processes of the other ranks among the children of a process."""
    return [child for child in psutil.Process(pid).children(recursive=True) if is_rank(child)]


def is_rank(process: psutil.Process) -> bool:
    try:
        return RANK in process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def tokens_of(llm: LLM, prompts: list[list[int]], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(out.token_ids) for out in llm.generate(prompts, sampling)]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama", 2), ("llama", 4), ("qwen2-window", 2), ("qwen3", 2), ("phi3", 2), ("granite", 2), ("smollm3", 2),
        ("gemma2", 2), ("gemma3", 2), ("mixtral", 2), ("qwen2_moe", 2), ("qwen3_moe", 4), ("gpt_oss", 2),
        ("deepseek_v2", 2), ("deepseek_v3", 4),
    ],
)  # fmt: skip
def test_every_family_writes_the_tokens_of_one_process(name: str, size: int, tmp_path: Path) -> None:
    CHECKPOINTS[name].write(tmp_path)
    settings = {"dtype": "float32", "kv_memory": 8 << 20, "threads": 2}
    whole, shared = LLM(str(tmp_path), **settings), LLM(str(tmp_path), tensor_parallel=size, **settings)
    assert tokens_of(shared, PROMPTS) == tokens_of(whole, PROMPTS)
    assert len(ranks_of(os.getpid())) >= size - 1
    shared.close()


@pytest.fixture(scope="module")
def whole() -> LLM:
    return LLM("tiny", dtype="float32", kv_memory=16 << 20)


@pytest.mark.parametrize(("connector", "theirs", "ours"), [("shm", 1, 2), ("tcp", 2, 1), ("nixl", 4, 2)])
def test_pages_are_handed_over_between_numbers_of_ranks(connector: str, theirs: int, ours: int, whole: LLM) -> None:
    hand_over(connector, theirs, ours, whole)


@pytest.mark.long
@pytest.mark.parametrize("connector", ["shm", "tcp", "nixl"])
@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (4, 2), (2, 2), (2, 4), (4, 1), (1, 4), (4, 4)])
def test_pages_are_handed_over_between_all_numbers_of_ranks(connector: str, theirs: int, ours: int, whole: LLM) -> None:
    hand_over(connector, theirs, ours, whole)


def hand_over(connector: str, theirs: int, ours: int, whole: LLM) -> None:
    """Compare prompts that a pair with these numbers of ranks computes with one process."""
    with a_pair(connector, *(["--tensor-parallel", str(size)] for size in (theirs, ours))) as pair:
        for length in (1, 16, 33, 290):
            prompt = [(7 * i + length) % 200 for i in range(length)]
            tokens, handoff = pair.hand_over(prompt)
            assert handoff.outcome == Fetched, handoff.reason
            assert tokens == tokens_of(whole, [prompt], SHORT)[0]
        assert_workers_idle(pair.admin)


FEATURES: dict[str, tuple[dict[str, object], SamplingParams]] = {
    "cached prefixes": ({}, GREEDY),
    "preemption": ({"kv_memory": 100 << 10, "max_model_len": 160}, GREEDY),
    "speculation": ({"speculation": "ngram?k=4"}, GREEDY),
    "small steps": ({"limits": None}, GREEDY),
    "seeded samples": ({}, SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)),
    "log-probabilities": ({}, SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, prompt_logprobs=2)),
    "without overlap": ({"async_steps": "off"}, GREEDY),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features_that_share_pages_and_steps(name: str) -> None:
    changes, sampling = FEATURES[name]
    settings = {"dtype": "float32", "kv_memory": 8 << 20, **changes}
    if name == "small steps":
        settings.pop("limits")
        settings |= {"token_budget": 16, "max_chunk_tokens": 7}
    prompts = [[(3 * i + j) % 200 for i in range(60)] + [j] * 5 for j in (0, 0, 1, 2)] * 2
    results = []
    for size in (1, 2):
        llm = LLM("tiny", tensor_parallel=size, **settings)
        results.append([tokens_of(llm, prompts, sampling) for _ in range(2)])
        assert llm.engine.is_idle
        llm.close()
    assert results[0] == results[1]


def test_adapters_are_divided_and_forgotten(tmp_path: Path) -> None:
    for number in (0, 1):
        write(tmp_path / f"a{number}", tiny.config(), seed=number)
    names = {"first": str(tmp_path / "a0"), "second": str(tmp_path / "a1")}
    results = []
    for size in (1, 2):
        llm = LLM("tiny", dtype="float32", kv_memory=8 << 20, tensor_parallel=size, adapters=names)
        models = (*names, "tiny")
        results.append([[out.token_ids for out in llm.generate(PROMPTS, GREEDY, model=one)] for one in models])
        llm.unload_adapter("first")
        assert [out.token_ids for out in llm.generate(PROMPTS, GREEDY)] == results[-1][2]
        llm.close()
    assert results[0] == results[1]
    assert results[0][0] != results[0][1] != results[0][2]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tensor_parallel": 3}, "num_attention_heads 4 is not a multiple"),
        ({"tensor_parallel": 2, "kernels": "torch"}, "needs the compiled kernels"),
        ({"tensor_parallel": 2, "speculation": "medusa=/folder"}, "medusa heads need"),
        ({"tensor_parallel": 65}, "from 1 to 64"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_a_process_starts(settings: dict[str, object], text: str) -> None:
    before = len(ranks_of(os.getpid()))
    with pytest.raises(UsageError, match=text):
        LLM("tiny", dtype="float32", kv_memory=8 << 20, **settings)
    assert len(ranks_of(os.getpid())) == before


def test_a_killed_rank_ends_all_steps_of_its_model() -> None:
    llm = LLM("tiny", dtype="float32", kv_memory=8 << 20, tensor_parallel=2)
    (rank,) = ranks_of(os.getpid())
    rank.kill()
    until(lambda: not is_alive(rank), "the end of the rank")
    for _ in range(2):
        with pytest.raises(InvariantBroken, match="rank 1 was ended by SIGKILL"):
            tokens_of(llm, PROMPTS)
    llm.close()


def test_a_stopped_rank_ends_the_step_after_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_ranked, "STEP_SECONDS", 0.5)
    llm = LLM("tiny", dtype="float32", kv_memory=8 << 20, tensor_parallel=2)
    (rank,) = ranks_of(os.getpid())
    rank.suspend()
    with pytest.raises(InvariantBroken, match=r"rank 1 .* did not compute its part within 0 s"):
        tokens_of(llm, PROMPTS)
    llm.close()
    assert not is_alive(rank)


FORKED = """
import multiprocessing, os, sys
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM

llm = LLM("tiny", dtype="float32", kv_memory=8 << 20, tensor_parallel=2)
child = multiprocessing.get_context("fork").Process(target=llm.close)
child.start()
child.join(20)
assert child.exitcode == 0, child.exitcode
pid = os.fork()
if not pid:
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids))
"""


def test_a_forked_child_leaves_the_ranks_to_its_parent() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert found.stdout == "4\n", found.stderr


def test_closing_ends_a_step_in_progress_at_once() -> None:
    llm = LLM("tiny", dtype="float32", kv_memory=16 << 20, tensor_parallel=2)
    outcome: list[BaseException] = []

    def generate() -> None:
        try:
            llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    until(lambda: llm.engine.has_work, "a running request")
    llm.close()
    thread.join(20)  # less than the deadline of a step
    (error,) = outcome
    assert "the model was closed" in str(error)
    with pytest.raises(InvariantBroken, match="the model was closed"):
        tokens_of(llm, PROMPTS)


def test_a_file_in_the_current_folder_takes_the_place_of_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    llm = LLM("tiny", dtype="float32", kv_memory=8 << 20, tensor_parallel=2)
    assert len(tokens_of(llm, PROMPTS)) == len(PROMPTS)
    llm.close()


def test_closing_ends_the_other_ranks() -> None:
    llm = LLM("tiny", dtype="float32", kv_memory=8 << 20, tensor_parallel=4)
    ranks = ranks_of(os.getpid())
    assert len(ranks) == 3
    llm.close()
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_its_worker(number: signal.Signals) -> None:
    with a_worker("both", "--tensor-parallel", "2", model="tiny") as worker:
        ranks = ranks_of(worker.process.pid)
        assert len(ranks) == 1
        worker.process.send_signal(number)
        worker.process.wait(SECONDS)
        until(lambda: not any(map(is_alive, ranks)), "the end of the rank")


def test_an_idle_worker_stops_when_a_rank_has_ended() -> None:
    with a_worker("both", "--tensor-parallel", "2", model="tiny") as worker:
        end(ranks_of(worker.process.pid))
        assert worker.process.wait(SECONDS) != 0


def test_a_stream_survives_the_death_of_a_rank(whole: LLM) -> None:
    flags = ("--dtype", "float32", "--threads", "1", "--kv-memory", "16MiB", "--tensor-parallel", "2", "--both", "2")
    addresses = ("--log-level", "error", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json")
    long = SamplingParams(temperature=0.0, max_tokens=1200, ignore_eos=True)
    (expected,) = tokens_of(whole, [PROMPTS[1]], long)
    with running("up", "--model", "tiny", *flags, "--prefill", "0", "--decode", "0", *addresses) as stack:
        stack.wait_for("ready")
        with Client(str(stack.events["ready"]["grpc"]), timeout=SECONDS) as client:
            for attempt in range(10):  # the rank may belong to the worker that does not run the stream
                tokens: list[int] = []
                victims = ranks_of(stack.process.pid)[attempt % 2 :][:1]
                resumed = 0
                for chunk in client.generate(PROMPTS[1], long):
                    tokens += [token.token_id for token in chunk.tokens]
                    if len(tokens) >= 20:
                        end(victims)
                    resumed = chunk.timing.resumed if chunk.timing is not None else resumed
                assert tokens == expected
                until(lambda: len(ranks_of(stack.process.pid)) == 2, "a new worker with its rank")
                if resumed:
                    break
            assert resumed
        admin = stack.events["ready"]["workers"]
        assert isinstance(admin, dict)
        assert_workers_idle(admin.values())
        assert stack.stop() == 0


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
