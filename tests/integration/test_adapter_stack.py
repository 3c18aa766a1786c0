"""Adapters in a running stack: prefill and decode in separate processes, loaded, replaced and removed while serving."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx
import pytest
from harness.idle import assert_workers_idle
from harness.kernels.lora_files import write
from harness.servers.processes import running
from harness.waiting import until

from kvferry.client import Client
from kvferry.core.errors import UnknownModel
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM
from kvferry.model import tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPT = [(5 * i + i * i) % 250 for i in range(90)]
SECONDS = 60.0


class Stack:
    """A running stack and the folder from which its workers load adapters."""

    def __init__(self, ready: dict[str, object], folder: Path) -> None:
        self.http = f"http://{ready['http']}/v1"
        self.admin_url = f"http://{ready['admin']}"
        self.grpc = str(ready["grpc"])
        self.folder = folder
        workers = ready["workers"]
        assert isinstance(workers, dict)
        self.workers = [str(address) for address in workers.values()]

    def tokens(self, model: str, prompt: list[int] | None = None) -> list[int]:
        with Client(self.grpc) as client:
            chunks = client.generate(prompt or PROMPT, GREEDY, model=model)
            return [token.token_id for chunk in chunks for token in chunk.tokens]

    def admin(self, path: str, **body: str) -> httpx.Response:
        return httpx.post(f"{self.admin_url}/v1/{path}", json=body, timeout=SECONDS)

    def models(self) -> dict[str, str | None]:
        cards = httpx.get(f"{self.http}/models", timeout=SECONDS).json()["data"]
        return {card["id"]: card.get("parent") for card in cards}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("adapters")
    for number in range(4):
        write(folder / f"a{number}", tiny.config(), seed=number)
    flags = ("--dtype", "float32", "--kv-memory", "16MiB", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json")
    adapters = ("--adapter", f"first={folder}/a0", "--adapter", f"second={folder}/a1", "--adapter-slots", "2")
    more = (
        "--adapters-file",
        str(folder / "list.toml"),
        "--adapter-folder",
        str(folder),
        "--load-policy",
        "always",
        "--tier",
        "dram://?size=64MiB",
    )
    with running("up", "--model", "tiny", *flags, *adapters, *more) as process:
        made = Stack(dict(process.wait_for("ready")), folder)
        yield made
        assert_workers_idle(made.workers)
        assert process.stop() == 0


def expected(stack: Stack, path: str, prompt: list[int] | None = None) -> list[int]:
    """Return the tokens of one aggregated engine."""
    llm = LLM("tiny", dtype="float32", kv_memory=8 << 20, adapters={"x": str(stack.folder / path)})
    return list(llm.generate([prompt or PROMPT], GREEDY, model="x")[0].token_ids)


def test_prefill_and_decode_generate_the_tokens_of_one_engine(stack: Stack) -> None:
    assert stack.models() == {"tiny": None, "first": "tiny", "second": "tiny"}
    plain = stack.tokens("tiny")
    for _ in range(2):  # the second round uses cached prefixes
        assert stack.tokens("first") == expected(stack, "a0")
        assert stack.tokens("second") == expected(stack, "a1")
        assert stack.tokens("tiny") == plain
    assert len({tuple(stack.tokens(name)) for name in ("tiny", "first", "second")}) == 3
    body = {"model": "first", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    reply = httpx.post(f"{stack.http}/completions", json=body, timeout=SECONDS)
    assert reply.json()["model"] == "first"
    assert reply.json()["kvferry"]["handoff_outcome"] in ("fetched", "local")
    chat = {"model": "second", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    assert httpx.post(f"{stack.http}/chat/completions", json=chat, timeout=SECONDS).json()["model"] == "second"


def test_blocks_of_one_adapter_are_used_by_no_other_through_caches_tiers_and_hand_offs(stack: Stack) -> None:
    """Prompts with common prefixes run with each adapter and without, in random order. The workers' caches are reset in
    between, so that blocks come from the tiers.
    """
    prompts = [PROMPT[:80] + [extra] * 12 for extra in range(2)]
    engine = LLM(
        "tiny",
        dtype="float32",
        kv_memory=8 << 20,
        adapters={"first": str(stack.folder / "a0"), "second": str(stack.folder / "a1")},
    )
    cases = [(name, index) for name in ("tiny", "first", "second") for index in range(2)]
    right = {
        case: list(engine.generate([prompts[case[1]]], GREEDY, model=case[0].replace("tiny", ""))[0].token_ids)
        for case in cases
    }
    assert len({tuple(tokens) for tokens in right.values()}) == len(cases)
    random = Random(7)
    for number in range(30):
        name, index = random.choice(cases)
        assert stack.tokens(name, prompts[index]) == right[name, index]
        if number % 3 == 0:
            assert httpx.post(f"{stack.admin_url}/reset_prefix_cache", timeout=SECONDS).status_code == 200
    page = httpx.get(f"{stack.admin_url}/fleet", timeout=SECONDS).json()
    versions = [tuple((one["name"], one["digest"]) for one in worker["adapters"]) for worker in page["workers"]]
    assert len(versions) == 2
    assert versions[0] == versions[1]
    assert [name for name, _ in versions[0]] == ["first", "second"]


def test_an_unknown_adapter_is_an_unknown_model(stack: Stack) -> None:
    with pytest.raises(UnknownModel):
        stack.tokens("third")
    reply = httpx.post(f"{stack.http}/completions", json={"model": "third", "prompt": "a"}, timeout=SECONDS)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert httpx.get(f"{stack.http}/models/third", timeout=SECONDS).status_code == 404


def test_an_adapter_is_loaded_replaced_and_removed_while_serving(stack: Stack) -> None:
    folder = stack.folder / "swapped"
    shutil.copytree(stack.folder / "a2", folder)
    loaded = stack.admin("load_lora_adapter", lora_name="late", lora_path="swapped")
    assert loaded.status_code == 200, loaded.text
    digests = {worker["digest"] for worker in loaded.json()["workers"]}
    assert len(loaded.json()["workers"]) == 2
    assert len(digests) == 1
    assert stack.models()["late"] == "tiny"
    before, after = expected(stack, "a2"), expected(stack, "a3")
    assert stack.tokens("late") == before
    results: list[list[int]] = []
    serving = threading.Event()

    def serve() -> None:
        for _ in range(12):
            results.append(stack.tokens("late"))
            serving.set()

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert serving.wait(SECONDS)
    shutil.copytree(stack.folder / "a3", folder, dirs_exist_ok=True)
    replaced = stack.admin("load_lora_adapter", lora_name="late", lora_path=str(folder))
    assert replaced.status_code == 200, replaced.text
    assert digests.isdisjoint({worker["digest"] for worker in replaced.json()["workers"]})
    for thread in threads:
        thread.join(SECONDS)
    assert len(results) == 24
    assert all(tokens in (before, after) for tokens in results), "every answer comes from one version of the adapter"
    assert stack.tokens("late") == after
    assert stack.admin("unload_lora_adapter", lora_name="late").status_code == 200
    assert "late" not in stack.models()
    with pytest.raises(UnknownModel):
        stack.tokens("late")


def test_the_workers_follow_a_list_of_adapters(stack: Stack) -> None:
    def write_list(**paths: str) -> None:
        entries = (f'[[adapters]]\nname = "{name}"\npath = "{stack.folder / path}"' for name, path in paths.items())
        beside = stack.folder / "list.new"
        beside.write_text("\n".join(entries))
        beside.replace(stack.folder / "list.toml")

    def failures() -> list[dict[str, str]]:
        page = httpx.get(f"{stack.admin_url}/fleet", timeout=SECONDS).json()
        return [worker["adapter_failures"] for worker in page["workers"]]

    write_list(listed="a2", broken="none")
    until(lambda: "listed" in stack.models() and all(failures()), "the list is followed")
    assert stack.tokens("listed") == expected(stack, "a2")
    assert all("adapter_config.json" in found["broken"] for found in failures())
    write_list(listed="a3")
    after = expected(stack, "a3")
    until(lambda: stack.tokens("listed") == after, "the adapter is replaced")
    write_list()
    until(lambda: "listed" not in stack.models() and not any(failures()), "the adapter is removed")
    assert "first" in stack.models()  # given by a flag, not by the list


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"lora_name": "x", "lora_path": "../secret"}, 403, "not below"),
        ({"lora_name": "x", "lora_path": "/etc"}, 403, "not below"),
        ({"lora_name": "x", "lora_path": "."}, 403, "not below"),
        ({"lora_name": "x", "lora_path": "link"}, 403, "not below"),
        ({"lora_name": "x", "lora_path": "none"}, 400, "adapter_config.json"),
        ({"lora_name": "tiny", "lora_path": "a0"}, 400, "is the model's name"),
        ({"lora_name": "x"}, 400, "lora_path must be"),
        ({"lora_name": "x", "lora_path": "a0", "more": "y"}, 400, "'more' is not a field"),
    ],
)
def test_bad_loads_are_refused_by_name(stack: Stack, body: dict[str, str], status: int, message: str) -> None:
    link = stack.folder / "link"
    if not link.is_symlink():
        link.symlink_to("/etc")
    reply = stack.admin("load_lora_adapter", **body)
    assert (reply.status_code, message in reply.text) == (status, True), reply.text
    assert "x" not in stack.models()


def test_removing_an_unknown_adapter_is_an_unknown_model(stack: Stack) -> None:
    assert stack.admin("unload_lora_adapter", lora_name="nothing").status_code == 404
