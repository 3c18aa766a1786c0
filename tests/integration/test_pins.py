"""Pinned prefixes in a running stack: not evicted by other prompts, restored after a restart of the worker,
evictable after they are unpinned."""

from collections.abc import Iterator

import httpx
import pytest
from harness.idle import assert_workers_idle
from harness.servers.processes import RunningProcess, running
from harness.waiting import until

from kvferry.client import Client
from kvferry.core.retention import CacheHints, Retention, RetentionOutcome
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM

SECONDS = 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PREFIX = [(17 + 5 * i) % 199 for i in range(100)]
"""Six blocks of 16 tokens, and four tokens."""
PROMPT = [*PREFIX, 7, 8, 9]


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningProcess]:
    # 48 pages, of which at most 12 are pinned: eight other prompts evict everything else.
    flags = ("--model", "tiny", "--dtype", "float32", "--threads", "1", "--kv-memory", "384KiB")
    more = ("--max-model-len", "256", "--connector", "tcp", "--load-policy", "always", "--log-level", "error")
    addresses = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json")
    with running("up", *flags, *more, *addresses) as process:
        process.wait_for("ready")
        yield process
        admin = process.events["ready"]["workers"]
        assert isinstance(admin, dict)
        assert_workers_idle(admin.values())
        assert process.stop() == 0


def admin(stack: RunningProcess, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"http://{stack.events['ready']['admin']}{path}", json=body, timeout=SECONDS)


def prefill_pins(stack: RunningProcess) -> tuple[int, int]:
    """Return the number of pins and of pinned pages that the prefill worker reports."""
    found = httpx.get(f"http://{stack.events['ready']['admin']}/pins", timeout=SECONDS).json()
    (worker,) = found["workers"]
    return worker["pins"], worker["blocks_pinned"]


def prefill_incarnation(stack: RunningProcess) -> str | None:
    """Return the incarnation of the prefill worker; `None` if it accepts no requests."""
    fleet = httpx.get(f"http://{stack.events['ready']['admin']}/fleet", timeout=SECONDS).json()
    (worker,) = [worker for worker in fleet["workers"] if worker["role"] == "prefill"]
    return None if worker["why_not"] else str(worker["incarnation"])


def cached(client: Client, prompt: list[int]) -> int:
    """Complete a prompt and return the number of its tokens that were cached."""
    (whole,) = client.complete(prompt, GREEDY)
    return whole.usage.cached_tokens


def flood(client: Client, first: int) -> None:
    """Complete prompts that need twice the pages of a worker and share none with others."""
    for number in range(first, first + 8):
        client.complete([number, *((number * 31 + 3 * i) % 199 for i in range(200))], GREEDY)


def test_a_pinned_prefix_survives_a_flood_and_a_restart_and_is_evictable_afterwards(stack: RunningProcess) -> None:
    right = list(LLM("tiny", dtype="float32", kv_memory=16 << 20).generate([PROMPT], GREEDY)[0].token_ids)
    other = [*reversed(PREFIX)]
    with Client(str(stack.events["ready"]["grpc"]), timeout=SECONDS) as client:
        made = admin(stack, "/pin_prefix", prompt=PREFIX, ttl_seconds=3600)
        assert made.status_code == 200, made.text
        assert [(pin["num_tokens"], pin["num_blocks"]) for pin in made.json()["workers"]] == [(96, 6)]
        cached(client, other)
        flood(client, 0)
        assert cached(client, other) == 0, "the flood evicts what is not pinned"
        flood(client, 10)
        (whole,) = client.complete(PROMPT, GREEDY)
        assert (whole.usage.cached_tokens, list(whole.token_ids)) == (96, right)
        assert whole.timing.handoff_outcome in ("fetched", "local"), "a KV prefetch may have been faster"
        until(lambda: prefill_pins(stack) == (1, 6), "the status of the worker shows the pin")

        full = admin(stack, "/pin_prefix", prompt=list(range(112)), ttl_seconds=60)
        assert full.status_code == 429
        assert "needs 7 more pages, but pins may use 12 pages and use 6" in full.json()["error"]["message"]

        before = prefill_incarnation(stack)
        (worker,) = stack.children("prefill")
        worker.kill()
        worker.wait(SECONDS)
        until(lambda: prefill_incarnation(stack) not in (before, None), "the worker has restarted")
        until(lambda: prefill_pins(stack) == (1, 6), "the restarted worker has the pin")
        assert cached(client, PROMPT) == 96

        ended = admin(stack, "/unpin_prefix", prompt=PREFIX)
        assert [pin["num_blocks"] for pin in ended.json()["workers"]] == [6]
        flood(client, 20)
        assert cached(client, PROMPT) == 0


def test_a_retained_prompt_survives_a_flood_and_its_client_is_told_so(stack: RunningProcess) -> None:
    url = f"http://{stack.events['ready']['http']}"
    conversation = {"role": "user", "content": [{"type": "text", "text": "Remember the number seven. " * 3}]}
    marked = {**conversation["content"][0], "cache_control": {"type": "ephemeral", "ttl": "1h"}}  # type: ignore[index]
    body = {"max_tokens": 2, "messages": [{**conversation, "content": [marked]}]}
    first = httpx.post(f"{url}/v1/messages", json=body, timeout=SECONDS)
    assert first.status_code == 200, first.text
    granted = first.json()["kvferry"]["retention"]
    assert (granted["outcome"], granted["seconds"]) == ("retained", 3600.0)
    assert 64 <= granted["num_tokens"] <= 96
    with Client(str(stack.events["ready"]["grpc"]), timeout=SECONDS) as client:
        flood(client, 30)
        again = httpx.post(f"{url}/v1/messages", json=body, timeout=SECONDS).json()
        assert again["usage"]["cache_read_input_tokens"] >= granted["num_tokens"] - 16
        (large,) = client.complete(list(range(112)), GREEDY, hints=CacheHints(retain_seconds=60.0))
        assert large.timing.retention == Retention(RetentionOutcome.QUOTA)
        (plain,) = client.complete(list(range(40)), GREEDY)
        assert plain.timing.retention is None
    reset = admin(stack, "/reset_prefix_cache")
    assert reset.status_code == 200, reset.text
