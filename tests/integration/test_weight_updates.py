"""Pauses and new weights in a running stack, with streams in flight, KV in a Redis tier, and workers that are lost."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from harness.idle import assert_workers_idle
from harness.kernels.tiny_checkpoints import write_checkpoint
from harness.servers.processes import RunningProcess, running
from harness.servers.redis_server import redis_server
from harness.servers.worker_channel import worker_channel
from harness.waiting import until

from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM
from kvferry.v1 import worker_admin_pb2, worker_admin_pb2_grpc

SECONDS = 60.0
PROMPT = [(5 * i + i * i) % 250 for i in range(90)]
LENGTH = 2000


@dataclass
class Stack:
    """A running stack and the folder from which its workers load weights."""

    process: RunningProcess
    folder: Path
    http: str
    admin: str
    workers: list[str]

    @classmethod
    def of(cls, process: RunningProcess, folder: Path) -> "Stack":
        ready = process.wait_for("ready")
        workers = ready["workers"]
        assert isinstance(workers, dict)
        return cls(
            process, folder, f"http://{ready['http']}", f"http://{ready['admin']}", [str(a) for a in workers.values()]
        )

    def post(self, route: str, **body: object) -> httpx.Response:
        return httpx.post(f"{self.admin}{route}", json=body, timeout=SECONDS)

    def get(self, path: str) -> dict[str, object]:
        found: dict[str, object] = httpx.get(f"{self.admin}{path}", timeout=SECONDS).json()
        return found

    def pause(self, query: str = "mode=keep") -> None:
        answer = httpx.post(f"{self.admin}/pause?{query}", timeout=SECONDS)
        assert answer.status_code == 200, answer.text

    def update(self, path: str, **more: object) -> dict[str, object]:
        answer = self.post("/weights", path=path, **more)
        assert answer.status_code == 200, answer.text
        found: dict[str, object] = answer.json()
        return found

    def accepting(self) -> dict[str, int]:
        """Return the revision of the weights of each worker that accepts requests, by incarnation."""
        workers = httpx.get(f"{self.admin}/fleet", timeout=SECONDS).json()["workers"]
        return {one["incarnation"]: one["weights"]["revision"] for one in workers if one["takes_work"]}

    def wait_for_replacement(self, before: dict[str, int]) -> None:
        """Wait until another worker is in place of a lost one, and all have the same weights."""

        def is_replaced() -> bool:
            now = self.accepting()
            return len(now) == len(before) and now.keys() != before.keys() and len(set(now.values())) == 1

        until(is_replaced, "all workers have the same weights again")

    def answers(self) -> bool:
        """Return whether the gateway answers and accepts requests."""
        try:
            return httpx.get(f"{self.admin}/ready", timeout=SECONDS).status_code == 200
        except httpx.TransportError:
            return False

    def tokens(self, prompt: list[int], max_tokens: int = 12) -> tuple[list[int], str]:
        """Return the greedy tokens of a prompt and the version that made the last one."""
        sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body = {"token_ids": prompt, "sampling_params": sampling}
        answer = httpx.post(f"{self.http}/inference/v1/generate", json=body, timeout=SECONDS)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return choice["token_ids"], choice["weight_version"]


@dataclass
class Stream:
    """A stream that is read on its own thread."""

    stack: Stack
    prompt: list[int]
    length: int = LENGTH
    tokens: list[int] = field(default_factory=list)
    last: dict[str, object] = field(default_factory=dict)
    failure: str = ""

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        sampling = {"max_tokens": self.length, "temperature": 0, "ignore_eos": True}
        body = {"token_ids": self.prompt, "sampling_params": sampling, "stream": True}
        url = f"{self.stack.http}/inference/v1/generate"
        with httpx.stream("POST", url, json=body, timeout=SECONDS) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "choices" not in event:
                    self.failure = line
                    return
                for choice in event["choices"]:
                    self.tokens += choice["token_ids"]
                    self.last = choice

    def join(self) -> "Stream":
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        assert not self.failure, self.failure
        return self


FLAGS = ("--dtype", "float32", "--kv-memory", "8MiB", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for seed in (1, 2, 3):
        write_checkpoint(folder / f"v{seed}", seed, parts=seed, has_tokenizer=seed != 3)
    return folder


@pytest.fixture(scope="module")
def stack(checkpoints: Path) -> Iterator[Stack]:
    with redis_server() as redis:
        flags = ("--prefill", "1", "--decode", "2", "--tier", redis.tcp, "--load-policy", "always")
        model = ("--model", str(checkpoints / "v1"), "--weights-folder", str(checkpoints), "--weight-version", "v1")
        with running("up", *model, *flags, *FLAGS) as process:
            made = Stack.of(process, checkpoints)
            yield made
            assert_workers_idle(made.workers)
            assert process.stop() == 0


@pytest.fixture(autouse=True)
def resumed(stack: Stack) -> Iterator[None]:
    """Resume after each test, so that one that fails does not stop the others."""
    yield
    assert stack.post("/resume").status_code == 200


def alone(folder: Path, prompt: list[int], max_tokens: int) -> list[int]:
    """Return the tokens of one engine that has only these weights."""
    llm = LLM(str(folder), dtype="float32", kv_memory=8 << 20)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return list(llm.generate([prompt], sampling)[0].token_ids)


def stopped_streams(stack: Stack, count: int) -> list[Stream]:
    """Return streams that are stopped in the middle. Those of an attempt that was too slow run to their end."""
    for attempt in range(50):
        streams = [Stream(stack, [attempt, number, *PROMPT]) for number in range(count)]
        until(lambda made=streams: all(len(stream.tokens) > 5 for stream in made), "all streams run")
        stack.pause("mode=keep&clear_cache=false")
        if num_running(stack.workers) == count:
            return streams
        assert stack.post("/resume").status_code == 200
        for stream in streams:
            stream.join()
    raise AssertionError("every stream ended before it could be stopped")


def num_running(workers: list[str]) -> int:
    """Return the number of sequences in the batches of workers."""
    count = 0
    for address in workers:
        with worker_channel(address) as channel:
            stub = worker_admin_pb2_grpc.WorkerAdminStub(channel)
            count += stub.Status(worker_admin_pb2.StatusRequest(), timeout=SECONDS).load.running
    return count


def with_tokenizer(stack: Stack, name: str) -> Path:
    assert (stack.folder / name / "tokenizer.json").is_file()
    return stack.folder / name


def test_streams_stop_and_continue_with_new_weights_and_say_which_made_each_token(stack: Stack) -> None:
    assert stack.update("v1", version="v1")["version"] == "v1"
    streams = stopped_streams(stack, 4)
    assert stack.get("/is_paused")["is_paused"] is True
    waiting = Stream(stack, PROMPT, 4)
    answer = stack.update("v2", version="v2")
    assert answer["version"] == "v2"
    assert stack.get("/is_paused")["is_paused"] is True, "an update leaves a pause as it was"
    held = [len(stream.tokens) for stream in streams]
    assert waiting.tokens == []
    assert stack.post("/resume").status_code == 200
    assert waiting.join().tokens == alone(with_tokenizer(stack, "v2"), PROMPT, 4)
    old, new = (LLM(str(stack.folder / name), dtype="float32", kv_memory=8 << 20) for name in ("v1", "v2"))
    for stream, least in zip(streams, held, strict=True):
        stream.join()
        assert len(stream.tokens) == LENGTH
        assert stream.last["weight_version"] == "v2"
        runs = stream.last["weight_versions"]
        assert isinstance(runs, list)
        assert [name for name, _ in runs] == ["v1", "v2"]
        first = runs[1][1]
        assert least <= first
        for llm, prompt, tokens in (
            (old, stream.prompt, stream.tokens[:first]),
            (new, [*stream.prompt, *stream.tokens[:first]], stream.tokens[first:]),
        ):
            sampling = SamplingParams(temperature=0.0, max_tokens=len(tokens), ignore_eos=True)
            assert list(llm.generate([prompt], sampling)[0].token_ids) == tokens
    assert_workers_idle(stack.workers)


def test_no_cache_and_no_tier_answers_with_kv_of_other_weights(stack: Stack) -> None:
    """Each checkpoint is used twice, so that the second time its own KV is in the tier and other weights' is too."""
    prompt = [7, *PROMPT]
    right = {name: alone(with_tokenizer(stack, name), prompt, 12) for name in ("v1", "v2")}
    assert right["v1"] != right["v2"]
    for name in ("v1", "v2", "v1", "v2"):
        stack.update(name, version=name)
        for _ in range(2):
            assert stack.tokens(prompt) == (right[name], name)


def test_the_version_is_that_of_the_files_and_the_tokenizer_may_be_missing(stack: Stack) -> None:
    found = stack.update("v3")
    digest = found["digest"]
    assert isinstance(digest, str)
    assert found["version"] == digest[:12]
    assert stack.tokens(PROMPT)[1] == digest[:12]
    fleet = httpx.get(f"{stack.admin}/fleet", timeout=SECONDS).json()
    assert {worker["model_digest"] for worker in fleet["workers"]} == {digest}
    assert digest[:12] in httpx.get(f"{stack.admin}/metrics", timeout=SECONDS).text


def test_aborting_ends_a_stream_with_the_tokens_that_it_has(stack: Stack) -> None:
    (stream,) = stopped_streams(stack, 1)
    stack.pause("")
    stream.join()
    assert stream.last["finish_reason"] == "abort"
    assert 5 < len(stream.tokens) < LENGTH
    assert_workers_idle(stack.workers)
    assert stack.post("/resume").status_code == 200


def test_waiting_ends_when_running_requests_have(stack: Stack) -> None:
    stream = Stream(stack, [12, *PROMPT])
    until(lambda: len(stream.tokens) > 5, "the stream runs")
    stack.pause("mode=wait")
    assert len(stream.join().tokens) == LENGTH
    assert stack.post("/resume").status_code == 200


def test_a_client_that_leaves_a_paused_stream_frees_everything(stack: Stack) -> None:
    sampling = {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": sampling, "stream": True}
    with httpx.stream("POST", f"{stack.http}/inference/v1/generate", json=body, timeout=SECONDS) as answer:
        next(answer.iter_lines())
        stack.pause()
    assert_workers_idle(stack.workers)
    assert stack.post("/resume").status_code == 200


def test_routes_of_other_servers_mean_the_same(stack: Stack) -> None:
    assert stack.post("/pause_generation", mode="in_place").status_code == 200
    assert stack.get("/is_paused")["mode"] == "keep"
    answer = stack.post("/update_weights_from_disk", model_path="v1", weight_version="again")
    assert (answer.status_code, answer.json()["success"]) == (200, True)
    assert stack.get("/weights")["version"] == "again"
    assert stack.post("/continue_generation").status_code == 200
    refused = stack.post("/update_weights_from_disk", model_path="v1", flush_cache=False)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "flush_cache")
    assert stack.tokens(PROMPT)[1] == "again"


def test_a_worker_that_is_lost_gets_the_weights_of_the_pool_before_it_is_used(stack: Stack) -> None:
    """The worker that replaces a killed one starts with the weights of the start."""
    known = stack.update("v2", version="v2")
    before = stack.accepting()
    lost = stack.process.children("decode")[0]
    lost.kill()
    lost.wait(SECONDS)
    stack.wait_for_replacement(before)
    assert set(stack.accepting().values()) == {known["revision"]}
    for number in range(8):
        prompt = [40 + number, *PROMPT]
        assert stack.tokens(prompt) == (alone(with_tokenizer(stack, "v2"), prompt, 12), "v2")


def test_a_worker_that_is_killed_in_an_update_does_not_serve_other_weights(stack: Stack) -> None:
    stack.update("v1", version="v1")
    stack.pause()
    before = stack.accepting()
    lost = stack.process.children("decode")[0]
    lost.suspend()
    answers: list[httpx.Response] = []
    updating = threading.Thread(target=lambda: answers.append(stack.post("/weights", path="v2", version="v2")))
    updating.start()
    lost.kill()
    lost.wait(SECONDS)
    updating.join(SECONDS)
    version = "v2" if answers[0].status_code == 200 else "v1"
    assert stack.get("/weights")["version"] == version, answers[0].text
    stack.wait_for_replacement(before)
    assert stack.post("/resume").status_code == 200
    for number in range(6):
        prompt = [60 + number, *PROMPT]
        assert stack.tokens(prompt) == (alone(with_tokenizer(stack, version), prompt, 12), version)


def test_a_pause_outlives_the_gateway(stack: Stack) -> None:
    weights = stack.update("v1", version="v1")
    stack.pause()
    lost = stack.process.children("gateway")[0]
    lost.kill()
    lost.wait(SECONDS)
    until(stack.answers, "the gateway is back")
    until(lambda: bool(stack.get("/is_paused")["is_paused"]), "the gateway knows of the pause")
    assert stack.get("/weights") == weights
    assert any("generation is paused" in note for note in stack.get("/ready")["notes"])  # type: ignore[attr-defined]
    assert stack.post("/resume").status_code == 200
    assert stack.tokens(PROMPT)[1] == "v1"


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("missing", 400, "neither a folder"),
        ("../secret", 403, "not below"),
        ("/etc", 403, "not below"),
        ("truncated", 400, "no worker changed"),
        ("other-shape", 400, "another model"),
        ("not-finite", 400, "no worker changed"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_changes_nothing(stack: Stack, path: str, status: int, words: str) -> None:
    known = stack.get("/weights")
    if path in ("truncated", "other-shape", "not-finite") and not (stack.folder / path).exists():
        made = write_checkpoint(stack.folder / path, 4, **({"rope_theta": 5.0} if path == "other-shape" else {}))
        file = made / "model.safetensors"
        if path == "truncated":
            file.write_bytes(file.read_bytes()[:-1000])
        if path == "not-finite":
            data = bytearray(file.read_bytes())
            data[-4:] = b"\xff\xff\xff\x7f"
            file.write_bytes(data)
    refused = stack.post("/weights", path=path)
    assert refused.status_code == status, refused.text
    assert words in refused.json()["error"]["message"]
    assert stack.get("/weights") == known
    assert stack.get("/is_paused")["is_paused"] is False
    assert stack.tokens(PROMPT)[1] == known["version"]
