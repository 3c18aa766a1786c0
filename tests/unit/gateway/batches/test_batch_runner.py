"""The runner with a scripted API: order, retries, cancellation, expiry, restarts, full disks, and what is left over."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from harness.waiting import eventually

from kvferry.core.clock import ManualClock
from kvferry.core.errors import UnknownModel
from kvferry.gateway.batches import batch_runner
from kvferry.gateway.batches.batch_run import LineAnswer, RunParts
from kvferry.gateway.batches.batch_runner import BatchRunner
from kvferry.gateway.batches.batch_service import BatchService
from kvferry.gateway.batches.batch_usage import BatchUsage
from kvferry.gateway.batches.folder import BatchFolder
from kvferry.gateway.batches.line_slots import LineSlots
from kvferry.gateway.batches.records import WINDOW_SECONDS, BatchRecord
from kvferry.gateway.batches.states import BatchState
from kvferry.gateway.decide.config import BatchConfig

PATH = "/v1/embeddings"
GOOD = LineAnswer(200, "req-1", b'{"ok":true}')


@dataclass
class Api:
    """A scripted client API."""

    answers: dict[str, list[LineAnswer]] = field(default_factory=dict)
    """Answers by input, in order; then `GOOD`."""
    held: set[str] = field(default_factory=set)
    """Inputs that are not answered."""
    calls: list[str] = field(default_factory=list)
    running: int = 0
    most: int = 0

    async def __call__(self, tenant: str, path: str, body: bytes) -> LineAnswer:
        name = f"{tenant}:{json.loads(body)['input']}"
        self.calls.append(name)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            if name in self.held:
                await asyncio.get_running_loop().create_future()
            return self.answers[name].pop(0) if self.answers.get(name) else GOOD
        finally:
            self.running -= 1


@dataclass
class Rig:
    """A folder, its service, and what runs its batches."""

    service: BatchService
    clock: ManualClock
    parts: RunParts
    api: Api
    outcomes: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[BatchRunner]:
        runner = BatchRunner(self.parts, self.service.changed)
        task = asyncio.create_task(runner.run())
        try:
            yield runner
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.assert_idle()

    def assert_idle(self) -> None:
        """Check that no line runs or holds a place, and that no task is left."""
        assert self.api.running == 0
        assert self.parts.slots.num_taken == 0
        assert {task.get_name() for task in asyncio.all_tasks()} & {"batch", "batch line", "batch stopped"} == set()

    async def upload(self, content: bytes, tenant: str = "t") -> str:
        async with self.service.receiving(tenant, len(content)) as upload:
            upload.write(content)
            return (await self.service.add_file(tenant, upload, "batch", "lines", None)).id

    async def create(self, *names: str, tenant: str = "t", content: bytes | None = None) -> BatchRecord:
        made = b"".join(line(name) for name in names) if content is None else content
        return await self.service.create_batch(tenant, await self.upload(made, tenant), PATH, None, None)

    async def state(self, batch: BatchRecord) -> BatchRecord:
        return await self.service.batch(batch.tenant, batch.id)

    async def over(self, batch: BatchRecord) -> BatchRecord:
        """Wait until a batch is over; return it."""
        async with asyncio.timeout(10):
            while not (found := await self.state(batch)).is_over:
                self.service.changed.set()
        return found

    def results(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        with self.service.storage.open_content(file_id) as file:
            return [json.loads(text) for text in file]

    def ids(self, file_id: str | None) -> list[str]:
        return sorted(result["custom_id"] for result in self.results(file_id))


def line(name: str, **changes: Any) -> bytes:
    fields = {"custom_id": name, "method": "POST", "url": PATH, "body": {"model": "m", "input": name}, **changes}
    return json.dumps(fields).encode() + b"\n"


@contextmanager
def rigged(path: Path, clock: ManualClock | None = None, places: int = 2) -> Iterator[Rig]:
    clock = clock or ManualClock()
    service = BatchService(BatchFolder(path), BatchConfig(path, tenant_file_bytes=100_000), clock)
    api, outcomes, pauses = Api(), list[str](), list[float]()

    def check_model(_tenant: str, model: str) -> None:
        if model != "m":
            raise UnknownModel(f"model {model!r} is not served here")

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    slots = LineSlots(lambda: places)
    parts = RunParts(
        service.storage, service.config, clock, slots, api, check_model,
        has_tenant=lambda tenant: tenant != "gone", tenant_lines=lambda _: 99, on_line=outcomes.append, pause=pause,
    )  # fmt: skip
    yield Rig(service, clock, parts, api, outcomes, pauses)
    service.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with rigged(tmp_path / "batches") as made:
        yield made


async def test_a_batch_is_completed_with_a_bounded_number_of_lines_at_a_time(rig):
    names = [str(number) for number in range(20)]
    batch = await rig.create(*names)
    assert batch.status is BatchState.VALIDATING
    async with rig.running() as runner:
        done = await rig.over(batch)
        assert (done.status, done.total, done.completed, done.failed) == (BatchState.COMPLETED, 20, 20, 0)
        assert list(done.times) == ["in_progress", "finalizing", "completed"]
        assert done.usage == BatchUsage(), "the bodies of these answers have none"
        assert rig.ids(done.output_file_id) == sorted(names)
        assert done.error_file_id is None
        assert 1 <= rig.api.most <= 2
        result = rig.results(done.output_file_id)[0]
        assert result["response"] == {"status_code": 200, "request_id": "req-1", "body": {"ok": True}}
        assert result["error"] is None
        found = await rig.service.file("t", done.output_file_id)
        assert found.purpose == "batch_output"
        await eventually(lambda: runner.num_runs == 0)
    assert await asyncio.to_thread(rig.service.storage.content_size, rig_error(done)) is None


def rig_error(batch: BatchRecord) -> str:
    return f"file-{batch.id.removeprefix('batch_')}e"


async def test_a_line_for_which_there_is_no_room_is_sent_again_and_does_not_fail(rig):
    full = LineAnswer(429, "r", b'{"error":{}}', 3.0)
    late = LineAnswer(504, "r", b"{}", code="deadline_in_queue")
    rig.api.answers["t:a"] = [full, LineAnswer(503, "r", b"{}"), late]
    batch = await rig.create("a", "b")
    async with rig.running():
        done = await rig.over(batch)
    assert (done.completed, done.failed) == (2, 0)
    assert rig.api.calls.count("t:a") == 4
    assert rig.pauses == [3.0, 1.0, 2.0]
    assert sorted(rig.outcomes) == ["completed", "completed", "retried", "retried", "retried"]


async def test_refused_lines_are_in_the_error_file(rig):
    rig.api.answers["t:b"] = [LineAnswer(400, "r-b", b'{"error":{"message":"no"}}')]
    content = line("a") + line("b") + line("s", body={"model": "m", "input": "s", "stream": True})
    batch = await rig.create(content=content)
    async with rig.running():
        done = await rig.over(batch)
    assert (done.status, done.completed, done.failed) == (BatchState.COMPLETED, 1, 2)
    by_id = {result["custom_id"]: result for result in rig.results(done.error_file_id)}
    assert by_id["b"]["response"]["status_code"] == 400
    assert by_id["b"]["response"]["body"]["error"]["message"] == "no"
    assert by_id["s"]["response"] is None
    assert by_id["s"]["error"]["code"] == "stream_not_supported"
    assert rig.api.calls == ["t:a", "t:b"]


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (line("a") + b"{\n" + line("c"), "invalid_json_line", 2),
        (line("a") + line("a"), "duplicate_custom_id", 2),
        (line("a", body={"model": "other", "input": "x"}), "model_not_found", 1),
        (line("a")[:30], "invalid_json_line", 1),
        (b"", "empty_file", None),
    ],
)
async def test_an_invalid_file_fails_the_batch_and_no_line_runs(rig, content, code, number):
    batch = await rig.create(content=content)
    async with rig.running():
        done = await rig.over(batch)
    assert (done.status, rig.api.calls) == (BatchState.FAILED, [])
    assert [(error.code, error.line) for error in done.errors] == [(code, number)]


async def test_a_cancelled_batch_keeps_its_results_and_ends_its_lines(rig):
    rig.api.held = {"t:c", "t:d"}
    batch = await rig.create(*"abcdef")
    async with rig.running():
        await eventually(lambda: rig.api.running == 2 and len(rig.api.calls) == 4)
        cancelled = await rig.service.cancel_batch("t", batch.id)
        assert cancelled.status in (BatchState.CANCELLING, BatchState.CANCELLED)
        done = await rig.over(batch)
        assert (done.status, done.completed, done.failed) == (BatchState.CANCELLED, 2, 4)
        assert rig.ids(done.output_file_id) == ["a", "b"]
        assert rig.ids(done.error_file_id) == ["c", "d", "e", "f"]
        assert {result["error"]["code"] for result in rig.results(done.error_file_id)} == {"batch_cancelled"}
        rig.assert_idle()
        again = await rig.service.cancel_batch("t", batch.id)
        assert again.status is BatchState.CANCELLED


async def test_a_batch_that_waits_is_cancelled_and_runs_no_line(rig):
    batch = await rig.create("a")
    await rig.service.cancel_batch("t", batch.id)
    async with rig.running():
        done = await rig.over(batch)
    assert (done.status, rig.api.calls, done.error_file_id) == (BatchState.CANCELLED, [], None)


@pytest.mark.parametrize("held", [{"t:b"}, set()])
async def test_a_batch_expires_at_the_end_of_its_window(rig, held):
    rig.api.held = held
    batch = await rig.create("a", "b", "c", "d")
    rig.api.answers = {f"t:{name}": [LineAnswer(429, "r", b"{}")] * 100_000 for name in "cd"}
    async with rig.running():
        await eventually(lambda: rig.api.calls.count("t:c") > 3)
        rig.clock.advance(WINDOW_SECONDS)
        done = await rig.over(batch)
        rig.assert_idle()
    assert done.status is BatchState.EXPIRED
    assert rig.ids(done.error_file_id) == sorted({name.removeprefix("t:") for name in held} | {"c", "d"})
    assert {result["error"]["code"] for result in rig.results(done.error_file_id)} == {"batch_expired"}
    assert done.completed + done.failed == 4


async def test_a_restart_goes_on_and_does_nothing_twice(tmp_path):
    clock = ManualClock()
    with rigged(tmp_path / "batches", clock) as first:
        first.api.held = {"t:c", "t:d"}
        batch = await first.create(*"abcdef")
        async with first.running():
            await eventually(lambda: first.api.running == 2 and len(first.api.calls) == 4)
        assert (await first.state(batch)).status is BatchState.IN_PROGRESS
    path = tmp_path / "batches" / "files" / f"file-{batch.id.removeprefix('batch_')}o"
    with path.open("ab") as file:
        file.write(b'{"id": "torn", "custom_id": "c"')  # as after a crash
    with rigged(tmp_path / "batches", clock) as second:
        async with second.running():
            done = await second.over(batch)
        assert (done.status, done.completed) == (BatchState.COMPLETED, 6)
        assert second.ids(done.output_file_id) == list("abcdef")
        assert sorted(second.api.calls) == ["t:c", "t:d", "t:e", "t:f"]


async def test_a_full_disk_delays_a_result_and_loses_none(rig, monkeypatch):
    from kvferry.gateway.batches.result_file import os as result_os

    real, fails = result_os.fsync, [True, True]

    def full(descriptor: int) -> None:
        if fails:
            fails.pop()
            raise OSError(28, "No space left on device")
        real(descriptor)

    batch = await rig.create("a", "b", "c")
    monkeypatch.setattr("kvferry.gateway.batches.result_file.os.fsync", full)
    async with rig.running():
        done = await rig.over(batch)
    assert rig.ids(done.output_file_id) == ["a", "b", "c"]
    assert sorted(rig.api.calls) == ["t:a", "t:b", "t:c"]
    assert not fails


async def test_tenants_run_side_by_side_and_the_batches_of_one_in_order(rig):
    rig.api.held = {"t:a"}
    first, second = await rig.create("a"), await rig.create("b")
    other = await rig.create("x", tenant="u")
    async with rig.running():
        assert (await rig.over(other)).completed == 1
        assert "t:b" not in rig.api.calls
        await rig.service.cancel_batch("t", first.id)
        assert (await rig.over(second)).completed == 1


async def test_the_lines_of_a_tenant_without_keys_and_those_beyond_its_bytes_fail(tmp_path):
    with rigged(tmp_path / "batches") as rig:
        gone = await rig.create("a", tenant="gone")
        config = replace(rig.parts.config, tenant_file_bytes=1)
        rig.parts = replace(rig.parts, config=config)
        full = await rig.create("b")
        async with rig.running():
            found = [await rig.over(gone), await rig.over(full)]
        codes = [rig.results(batch.error_file_id)[0]["error"]["code"] for batch in found]
        assert codes == ["tenant_removed", "storage_limit"]
        assert rig.api.calls == []


async def test_a_run_that_breaks_is_repeated_later(rig, monkeypatch, caplog):
    real, broken = rig.parts.call, [True]

    async def call(tenant: str, path: str, body: bytes) -> LineAnswer:
        if broken:
            broken.clear()
            raise RuntimeError("a defect")
        return await real(tenant, path, body)

    rig.parts = replace(rig.parts, call=call)
    batch = await rig.create("a", "b")
    async with rig.running():
        await eventually(lambda: not broken)
        await eventually(lambda: "is run again" in caplog.text)
        rig.clock.advance(batch_runner._PAUSE_SECONDS)
        assert (await rig.over(batch)).completed == 2


async def test_two_processes_share_a_folder_and_one_runs(tmp_path, caplog):
    clock = ManualClock()
    with rigged(tmp_path / "batches", clock) as first, rigged(tmp_path / "batches", clock) as second:
        await first.upload(b"")
        async with first.running() as runner:
            await eventually(lambda: first.service.storage.is_runner)
            async with second.running() as other:
                await eventually(lambda: "another gateway process runs the batches" in caplog.text)
                batch = await second.create("a")
                first.service.changed.set()
                async with asyncio.timeout(10):
                    while not (await second.state(batch)).is_over:
                        first.service.changed.set()
                assert (runner.num_runs, other.num_runs) == (0, 0) or runner.num_runs <= 1
            assert second.api.calls == []
            assert first.api.calls == ["t:a"]


async def test_slots_are_given_in_order_and_come_back_after_cancellations():
    limit = [1]
    slots, order = LineSlots(lambda: limit[0]), list[int]()
    release = asyncio.Event()

    async def use(number: int, wait: Callable[[], Any]) -> None:
        async with slots.taken():
            order.append(number)
            await wait()

    first = asyncio.create_task(use(0, release.wait))
    await eventually(lambda: order == [0])
    others = [asyncio.create_task(use(number, lambda: asyncio.sleep(0))) for number in range(1, 5)]
    await asyncio.sleep(0)
    others[1].cancel()
    release.set()
    await asyncio.gather(first, *others, return_exceptions=True)
    assert order == [0, 1, 3, 4]
    assert slots.num_taken == 0


async def test_the_lease_is_renewed_while_a_look_at_the_batches_takes_long(rig, monkeypatch):
    storage, ends, renewed = rig.service.storage, threading.Event(), list[int]()
    await rig.create("a")
    real_lock, real_batches = storage.try_lock, storage.records.open_batches
    looking = threading.Event()

    def slow() -> Sequence[BatchRecord]:
        looking.set()
        assert ends.wait(60)
        return real_batches()

    def counted() -> int:
        if looking.is_set():
            renewed.append(real_lock())
            return renewed[-1]
        return real_lock()

    monkeypatch.setattr(batch_runner, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(storage.records, "open_batches", slow)
    monkeypatch.setattr(storage, "try_lock", counted)
    async with rig.running():
        await eventually(lambda: len(renewed) >= 3)
        ends.set()
    assert all(renewed)


async def test_a_lease_that_is_lost_while_a_look_takes_long_starts_no_run(rig, monkeypatch):
    storage, looking, ends = rig.service.storage, threading.Event(), threading.Event()
    batch = await rig.create("a")
    real_lock, real_batches = storage.try_lock, storage.records.open_batches

    def slow() -> Sequence[BatchRecord]:
        looking.set()
        assert ends.wait(60)
        return real_batches()

    monkeypatch.setattr(batch_runner, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(storage.records, "open_batches", slow)
    monkeypatch.setattr(storage, "try_lock", lambda: 0 if looking.is_set() else real_lock())
    async with rig.running() as runner:
        await eventually(looking.is_set)
        await eventually(lambda: not runner.has_lease)
        ends.set()
        await eventually(lambda: not runner.has_lease and runner.num_runs == 0)
        assert (await rig.state(batch)).status is BatchState.VALIDATING
    assert rig.api.calls == []


async def test_a_look_that_fails_is_tried_again(rig, monkeypatch, caplog):
    batch = await rig.create("a")
    records = rig.service.storage.records
    real, fails = records.open_batches, [OSError(5, "Input/output error"), RuntimeError("unexpected")]

    def failing() -> Sequence[BatchRecord]:
        if fails:
            raise fails.pop()
        return real()

    monkeypatch.setattr(batch_runner, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(records, "open_batches", failing)
    async with rig.running():
        assert (await rig.over(batch)).status is BatchState.COMPLETED
    assert "cannot be run: unexpected" in caplog.text
    assert "cannot be run: [Errno 5]" in caplog.text
