"""Files and batches of a real stack: OpenAI's client, an interrupted gateway, and requests beside a batch."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from harness.idle import assert_workers_idle
from harness.servers.processes import RunningProcess, a_worker, running
from harness.waiting import until

CHAT = "/v1/chat/completions"
QUIET = ("--log-level", "error", "--drain-seconds", "1")


@pytest.fixture(scope="module")
def worker() -> Iterator[RunningProcess]:
    with a_worker("both", "--max-num-seqs", "4") as started:
        yield started


def gateway_arguments(worker: RunningProcess, folder: Path) -> tuple[str, ...]:
    listening = worker.events["listening"]
    both = f"{listening['grpc']}/{str(listening['admin']).rpartition(':')[2]}"
    ports = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
    return ("gateway", "--model", "tiny", "--both", both, *ports, "--batch-folder", str(folder), *QUIET)


def client_of(gateway: RunningProcess) -> openai.OpenAI:
    url = f"http://{gateway.wait_for('listening')['http']}/v1"
    return openai.OpenAI(base_url=url, api_key="any", max_retries=8, timeout=60)


def lines(count: int, tokens: int) -> bytes:
    body = {"model": "tiny", "max_tokens": tokens, "seed": 1, "ignore_eos": True}
    return "\n".join(
        json.dumps(
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": CHAT,
                "body": {**body, "messages": [{"role": "user", "content": f"Tell me {number} things."}]},
            }
        )
        for number in range(count)
    ).encode()


def begin(client: openai.OpenAI, content: bytes) -> str:
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    created = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    return created.id


def over(client: openai.OpenAI, batch_id: str) -> Any:
    ended = ("completed", "failed", "cancelled", "expired")
    until(lambda: client.batches.retrieve(batch_id).status in ended, "the batch is over")
    return client.batches.retrieve(batch_id)


def ids(client: openai.OpenAI, file_id: str | None) -> list[str]:
    if file_id is None:
        return []
    return [json.loads(line)["custom_id"] for line in client.files.content(file_id).text.splitlines()]


def test_a_killed_gateway_goes_on_after_its_start_and_does_nothing_twice(
    worker: RunningProcess, tmp_path: Path
) -> None:
    arguments, count = gateway_arguments(worker, tmp_path / "batches"), 200
    with running(*arguments) as first, client_of(first) as client:
        batch = begin(client, lines(count, 24))
        output = tmp_path / "batches" / "files" / f"file-{batch.removeprefix('batch_')}o"
        until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 5, "some lines are done")
        first.stop(signal.SIGKILL)
    before = output.read_bytes()
    assert 5 <= before.count(b"\n") < count
    with running(*arguments) as second, client_of(second) as client:
        done = over(client, batch)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", count, 0)
        texts = client.files.content(done.output_file_id).text.splitlines()
        used = [json.loads(text)["response"]["body"]["usage"] for text in texts]
        assert done.usage is not None
        assert done.usage.output_tokens == sum(one["completion_tokens"] for one in used) > count
        assert done.usage.total_tokens == sum(one["total_tokens"] for one in used)
        assert sorted(ids(client, done.output_file_id)) == sorted(f"line-{number}" for number in range(count))
        whole = before[: before.rindex(b"\n") + 1]
        assert client.files.content(done.output_file_id).content.startswith(whole), "results were not computed again"
        assert second.stop() == 0
    assert_workers_idle([str(worker.events["listening"]["admin"])])


def test_a_cancelled_batch_frees_the_workers_and_another_request_overtakes(
    worker: RunningProcess, tmp_path: Path
) -> None:
    with running(*gateway_arguments(worker, tmp_path / "batches")) as gateway, client_of(gateway) as client:
        batch = begin(client, lines(100, 200))
        until(lambda: client.batches.retrieve(batch).status == "in_progress", "the batch runs")
        message: Any = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(model="tiny", messages=message, max_tokens=4)
        assert answer.kvferry["queue_seconds"] < 0.25, "half of the places are left to other requests"  # type: ignore[attr-defined]
        assert client.batches.retrieve(batch).status == "in_progress"
        client.batches.cancel(batch)
        done = over(client, batch)
        assert done.status == "cancelled"
        found = ids(client, done.output_file_id) + ids(client, done.error_file_id)
        assert sorted(found) == sorted(f"line-{number}" for number in range(100))
        assert_workers_idle([str(worker.events["listening"]["admin"])])
        assert gateway.stop() == 0
