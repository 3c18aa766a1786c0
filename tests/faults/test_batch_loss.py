"""Batches whose gateway is killed or paused, and a Redis that loses them: each line has one result, nothing hangs."""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from harness.idle import assert_workers_idle
from harness.servers.gateway_pool import SECONDS, GatewayPool, gateway_pool, http, metric
from harness.servers.processes import RunningProcess
from harness.servers.redis_server import redis_server
from harness.waiting import until

CHAT = "/v1/chat/completions"
# One line at a time, so that a batch is never over when its progress, written each second, is first seen.
SHARED = ("--batch-folder", "state", "--batch-lines", "1", "--drain-seconds", "1")
COUNT = 150


@pytest.fixture(scope="module")
def pool() -> Iterator[GatewayPool]:
    with gateway_pool() as started:
        yield started
        assert_workers_idle([str(started.worker.events["listening"]["admin"])])


def client(process: RunningProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{http(process)}/v1", api_key="any", max_retries=0, timeout=SECONDS)


def lines(count: int, tokens: int) -> bytes:
    body = {"model": "tiny", "max_tokens": tokens, "seed": 1, "ignore_eos": True}
    made = (
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": CHAT,
            "body": {**body, "messages": [{"role": "user", "content": f"Tell me {number} things."}]},
        }
        for number in range(count)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in made)


def upload(process: RunningProcess, content: bytes) -> str:
    with client(process) as api:
        return api.files.create(file=("lines.jsonl", content), purpose="batch").id


def begin(process: RunningProcess, file_id: str) -> str:
    with client(process) as api:
        return api.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h").id


def batch(process: RunningProcess, batch_id: str) -> Any:
    with client(process) as api:
        return api.batches.retrieve(batch_id)


def over(process: RunningProcess, batch_id: str) -> Any:
    ended = ("completed", "failed", "cancelled", "expired")
    until(lambda: batch(process, batch_id).status in ended, "the batch is over")
    return batch(process, batch_id)


def ids(process: RunningProcess, file_id: str | None) -> list[str]:
    if file_id is None:
        return []
    with client(process) as api:
        return [json.loads(line)["custom_id"] for line in api.files.content(file_id).text.splitlines()]


def started(process: RunningProcess, batch_id: str) -> None:
    """Wait until some lines have a result."""
    until(lambda: batch(process, batch_id).request_counts.completed >= 5, "some lines are done")


def assert_whole(process: RunningProcess, done: Any) -> None:
    """Check that each line has one result."""
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", COUNT, 0)
    assert sorted(ids(process, done.output_file_id)) == sorted(f"line-{number}" for number in range(COUNT))


def computed(process: RunningProcess) -> float:
    return metric(process, 'kvferry_gateway_batch_lines_total{outcome="completed"}')


def test_a_batch_of_a_killed_gateway_is_completed_by_another(pool: GatewayPool) -> None:
    content = lines(COUNT, 24)
    before_all = lease_of(pool)
    with pool.gateway("", *SHARED) as victim:
        file = upload(victim, content)
        until(lambda: lease_of(pool) != before_all, "the first gateway runs batches")
        with pool.gateway("", *SHARED) as other:
            name = begin(other, file)
            started(other, name)
            victim.process.kill()
            assert victim.process.wait(SECONDS) == -signal.SIGKILL
            before = batch(other, name).request_counts.completed
            assert before < COUNT
            assert_whole(other, over(other, name))
            assert computed(other) <= COUNT - before, "lines with a result are not computed again"
            with client(other) as api:
                assert api.files.content(file).content == content
                assert other.stop() == 0


def lease_of(pool: GatewayPool) -> object:
    """Return the gateway that runs batches."""
    keys = pool.redis.ask(b"KEYS", b"*:f:lease")
    assert isinstance(keys, list)
    return pool.redis.ask(b"HGET", keys[0], b"g") if keys else None


def test_a_paused_gateway_writes_nothing_when_it_wakes_up(pool: GatewayPool) -> None:
    before = lease_of(pool)
    with pool.gateway("", *SHARED) as paused:
        until(lambda: lease_of(pool) != before, "the first gateway runs batches")
        with pool.gateway("", *SHARED) as other:
            name = begin(other, upload(other, lines(COUNT, 24)))
            started(other, name)
            runner = lease_of(pool)
            paused.process.send_signal(signal.SIGSTOP)
            try:
                until(lambda: lease_of(pool) != runner, "the other gateway has the lease")
            finally:
                paused.process.send_signal(signal.SIGCONT)
            done = over(other, name)
            assert_whole(other, done)
            assert_whole(paused, done)
            assert metric(other, 'kvferry_gateway_state_calls_total{outcome="ok",part="files"}') > 0


def test_a_batch_is_cancelled_at_any_gateway(pool: GatewayPool) -> None:
    with pool.gateway("", *SHARED) as first, pool.gateway("", *SHARED) as second:
        name = begin(first, upload(second, lines(COUNT, 200)))
        until(lambda: batch(second, name).status == "in_progress", "the batch runs")
        with client(second) as api:
            api.batches.cancel(name)
        done = over(first, name)
        assert done.status == "cancelled"
        found = ids(first, done.output_file_id) + ids(second, done.error_file_id)
        assert sorted(found) == sorted(f"line-{number}" for number in range(COUNT))


def test_another_tenant_reads_nothing(pool: GatewayPool, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-a a\nkey-b b\n")
    with ExitStack() as stack:
        both = [stack.enter_context(pool.gateway("", *SHARED, "--api-keys-file", str(keys))) for _ in range(2)]
        urls = [f"{http(process)}/v1/files" for process in both]
        as_a, as_b = ({"authorization": f"Bearer key-{tenant}"} for tenant in "ab")
        made = httpx.post(urls[0], data={"purpose": "batch"}, files={"file": b"{}\n"}, headers=as_a).json()["id"]
        for url in urls:
            assert httpx.get(f"{url}/{made}/content", headers=as_a).content == b"{}\n"
            assert httpx.get(f"{url}/{made}/content", headers=as_b).status_code == 404
            assert httpx.delete(f"{url}/{made}", headers=as_b).status_code == 404
            assert httpx.get(url, headers=as_b).json()["data"] == []


def test_a_redis_that_restarts_without_its_data_loses_batches_by_name_and_nothing_hangs(pool: GatewayPool) -> None:
    with ExitStack() as stack:
        lost = stack.enter_context(redis_server(policy="noeviction"))
        url = f"redis://127.0.0.1:{lost.port}/0"
        first, second = (stack.enter_context(pool.gateway(url, *SHARED)) for _ in range(2))
        file = upload(first, lines(COUNT, 24))
        name = begin(second, file)
        started(first, name)
        lost.kill()
        with httpx.Client(timeout=SECONDS) as plain:
            refused = plain.get(f"{http(first)}/v1/batches/{name}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "files_unavailable")
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            assert plain.post(f"{http(first)}{CHAT}", json=body).status_code == 200
            with redis_server(policy="noeviction", port=lost.port):
                until(lambda: plain.get(f"{http(first)}/v1/files").status_code == 200, "Redis answers again")
                assert plain.get(f"{http(second)}/v1/batches/{name}").status_code == 404
                assert plain.get(f"{http(first)}/v1/files/{file}/content").status_code == 404
                again = begin(first, upload(second, lines(COUNT, 2)))
                assert_whole(second, over(first, again))
                assert first.stop() == 0
                assert second.stop() == 0
