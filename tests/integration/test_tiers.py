"""A stack with too few pages: evicted blocks are loaded from a tier, with the same tokens and an explanation."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from harness.idle import assert_workers_idle
from harness.servers.processes import running

from kvferry.client import Client
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM

SECONDS = 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
# 48 pages of the tiny model do not hold two prompts of 320 tokens at the same time.
FLAGS = (
    "--model",
    "tiny",
    "--dtype",
    "float32",
    "--threads",
    "1",
    "--kv-memory",
    "384KiB",
    "--max-model-len",
    "768",
    "--load-policy",
    "always",
)
ADDRESSES = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json")


def a_prompt(number: int) -> list[int]:
    return [(number * 31 + 7 * i) % 199 for i in range(320)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    engine = LLM("tiny", dtype="float32", kv_memory=16 << 20)
    return [list(engine.generate([a_prompt(n)], GREEDY)[0].token_ids) for n in range(4)]


@pytest.fixture(scope="module")
def stack() -> Iterator[dict[str, object]]:
    with running("up", *FLAGS, *ADDRESSES, "--tier", "dram://?size=64MiB") as process:
        ready = dict(process.wait_for("ready"))
        yield ready
        admin = ready["workers"]
        assert isinstance(admin, dict)
        assert_workers_idle(admin.values())
        assert process.stop() == 0


def test_evicted_blocks_are_loaded_from_dram(stack: dict[str, object], expected: list[list[int]]) -> None:
    from_dram = 0
    with Client(str(stack["grpc"]), timeout=SECONDS) as client:
        for number in (0, 1, 2, 3, 0, 1, 2, 3):
            (whole,) = client.complete(a_prompt(number), GREEDY)
            assert whole.token_ids == expected[number]
            assert whole.timing is not None
            from_dram += sum(r.blocks_loaded for r in whole.timing.kv if r.source == "dram")
    assert from_dram >= 4 * 16


def test_loaded_tokens_count_as_cached_and_handed_off_tokens_do_not(stack: dict[str, object]) -> None:
    body = {"max_tokens": 4, "temperature": 0}
    with httpx.Client(base_url=f"http://{stack['http']}", timeout=SECONDS) as client:

        def usage(number: int) -> dict[str, Any]:
            answer = client.post("/v1/completions", json={"prompt": a_prompt(number), **body})
            found: dict[str, Any] = answer.json()["usage"]["prompt_tokens_details"]
            return found

        assert usage(7) == {"cached_tokens": 0, "cache_write_tokens": 320}, "a hand-off is no cached token"
        usage(8)
        usage(9)
        again = usage(7)
        assert again["cached_tokens"] >= 256, "the evicted blocks are loaded, except those after the last whole object"
        assert again["cached_tokens"] + again["cache_write_tokens"] == 320
        response = client.post("/v1/responses", json={"input": "a b c " * 50, "max_output_tokens": 4}).json()
        assert response["usage"]["input_tokens_details"]["cached_tokens"] == 0
        message = client.post(
            "/v1/messages",
            json={"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "d e f " * 50}]},
        ).json()["usage"]
        assert message["cache_read_input_tokens"] < message["cache_creation_input_tokens"]


def test_a_request_can_be_explained(stack: dict[str, object], capfd: pytest.CaptureFixture[str]) -> None:
    http = str(stack["http"])
    body = {"prompt": a_prompt(0), "max_tokens": 4, "temperature": 0}
    headers = {"x-request-id": "why-1", "x-kvferry-kv": "1"}
    answer = httpx.post(f"http://{http}/v1/completions", json=body, headers=headers, timeout=SECONDS)
    assert answer.status_code == 200
    assert "expected load" in answer.headers["x-kvferry-kv"]
    with running("explain", "why-1", "--url", http) as process:
        assert process.process.stdout is not None
        printed = process.process.stdout.read().decode()
        assert process.process.wait(SECONDS) == 0
    assert "why-1  sample 0  done" in printed
    assert "prefill" in printed
    assert "loaded" in printed
    with running("explain", "why-1", "--url", http, "--json") as process:
        assert process.process.stdout is not None
        found = json.loads(process.process.stdout.read())
        assert process.process.wait(SECONDS) == 0
    (sample,) = found["samples"]
    assert {note["role"] for note in sample["routes"]} == {"prefill", "decode"}
    assert sample["timing"]["kv"]
    for unknown, where in [("never-was", http), ("why-1", "127.0.0.1:1")]:
        with running("explain", unknown, "--url", where) as process:
            assert process.process.wait(SECONDS) in {1, 2}
    shown = capfd.readouterr().err
    assert "not found" in shown
    assert "does not answer" in shown
    assert "Traceback" not in shown


def test_tiers_are_counted(stack: dict[str, object]) -> None:
    metrics = httpx.get(f"http://{stack['admin']}/metrics", timeout=SECONDS).text
    rows = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in metrics.splitlines() if line[0] != "#"}
    stored = [value for name, value in rows.items() if name.startswith("kvferry_tier_stored_bytes_total")]
    assert len(stored) == 2, "one series for each worker"
    assert sum(stored) > 0
