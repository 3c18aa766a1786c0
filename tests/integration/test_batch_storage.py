"""Files and batches: one suite over the folder and a real Redis."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from harness.servers.batch_pool import MOST, NOW, begun, line, listed, pool_of, read, stored
from harness.servers.redis_server import RedisServer, redis_server
from harness.waiting import eventually
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.clock import ManualClock
from kvferry.core.errors import Overloaded
from kvferry.gateway.batches import storage as stores
from kvferry.gateway.batches.batch_errors import NoSuchBatch, NoSuchFile, WrongState
from kvferry.gateway.batches.batch_run import BatchRun, RunParts
from kvferry.gateway.batches.folder import BatchFolder
from kvferry.gateway.batches.line_slots import LineSlots
from kvferry.gateway.batches.records import BatchRecord, FileRecord, new_file_id
from kvferry.gateway.batches.shared.shared_contents import CHUNK_BYTES
from kvferry.gateway.batches.states import BATCH_MACHINE, BatchEvent, BatchState
from kvferry.gateway.batches.storage import BatchStorage
from kvferry.gateway.batches.storage_threads import NUM_THREADS
from kvferry.gateway.decide.config import BatchConfig


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server(policy="noeviction") as running:
        yield running


@pytest.fixture(params=["folder", "redis"])
def storage(request: pytest.FixtureRequest, server: RedisServer, tmp_path: Path) -> Iterator[BatchStorage]:
    if request.param == "redis":
        with pool_of(server) as made:
            yield made.open()
        return
    opened = BatchFolder(tmp_path / "batches")
    _ = opened.records
    yield opened
    opened.close()


def test_a_tenant_sees_its_own_files_only(storage):
    mine, other = stored(storage), stored(storage, "b")
    assert listed(storage) == [mine.id]
    with pytest.raises(NoSuchFile) as foreign:
        storage.records.file("a", other.id, NOW)
    with pytest.raises(NoSuchFile) as unknown:
        storage.records.file("a", "file-" + "0" * 24, NOW)
    assert foreign.value.message.replace(other.id, "") == unknown.value.message.replace("file-" + "0" * 24, "")
    with pytest.raises(NoSuchFile):
        storage.delete("a", other.id, NOW)
    with pytest.raises(NoSuchFile, match="after"):
        listed(storage, after=other.id)
    assert read(storage, other.id) == b"xxx"


def test_files_are_listed_in_order_and_in_pages(storage):
    made = [stored(storage).id for _ in range(3)]
    assert listed(storage, limit=2) == made[:2]
    assert listed(storage, after=made[0]) == made[1:]
    assert listed(storage, is_ascending=False, after=made[2], limit=1) == [made[1]]
    assert listed(storage, purpose="batch_output") == []


def test_files_and_bytes_of_a_tenant_are_bounded_and_a_refused_file_leaves_nothing(storage):
    stored(storage, size=9)
    with pytest.raises(Overloaded, match="tenant_file_bytes"):
        stored(storage, size=2)
    stored(storage, size=0)
    stored(storage, size=0)
    with pytest.raises(Overloaded, match="tenant_files"):
        stored(storage, size=0)
    assert storage.records.stored_bytes("a") == 9
    stored(storage, "b", size=9)


def test_the_input_of_a_batch_is_not_deleted(storage):
    file = stored(storage)
    batch = begun(storage, file)
    with pytest.raises(WrongState, match=batch.id):
        storage.delete("a", file.id, NOW)
    storage.records.change(batch.id, BatchEvent.REFUSE, NOW)
    storage.delete("a", file.id, NOW)
    assert storage.content_size(file.id) is None


def test_states_follow_the_table(storage):
    batch = begun(storage, stored(storage))
    change = storage.records.change
    assert change(batch.id, None, NOW, completed=1) is None, "there is no progress before the validation"
    assert change(batch.id, BatchEvent.ACCEPT, NOW + 1, total=2).times == {"in_progress": NOW + 1}
    assert change(batch.id, None, NOW, completed=1).completed == 1
    assert change(batch.id, BatchEvent.CANCEL, NOW + 2).status is BatchState.CANCELLING
    assert change(batch.id, BatchEvent.FINISH, NOW) is None
    assert change(batch.id, BatchEvent.STOP, NOW + 3).is_over
    assert storage.records.open_batches() == []
    assert change("batch_none", BatchEvent.CANCEL, NOW) is None
    for state in BATCH_MACHINE.final:
        assert not any(BATCH_MACHINE.allows(state, event) for event in BatchEvent)


def test_batches_of_a_tenant_are_bounded(storage, monkeypatch):
    monkeypatch.setattr(stores, "MAX_OPEN_BATCHES", 2)
    monkeypatch.setattr(stores, "MAX_BATCHES", 3)
    file = stored(storage)
    made = [begun(storage, file).id for _ in range(2)]
    with pytest.raises(Overloaded, match="2 batches are not over"):
        begun(storage, file)
    for _ in range(3):
        storage.records.change(made[-1], BatchEvent.REFUSE, NOW)
        made.append(begun(storage, file).id)
    found = [record.id for record in storage.records.batches("a", limit=10, after=None)]
    assert found == [made[4], made[3], made[2], made[0]], "the oldest that was over is dropped"
    assert [r.id for r in storage.records.batches("a", limit=1, after=made[3])] == [made[2]]
    with pytest.raises(NoSuchBatch):
        storage.records.batch("b", made[4])
    storage.records.drop_batches(NOW + 1)
    assert {r.id for r in storage.records.batches("a", limit=10, after=None)} == {made[0], made[4]}


def test_contents_of_any_size_are_read_as_they_were_written(storage):
    for size in (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 7):
        content = bytes(range(256)) * (size // 256) + b"e" * (size % 256)
        upload = storage.new_upload(new_file_id())
        for begin in range(0, size, 100_000):
            upload.write(content[begin : begin + 100_000])
        record = FileRecord(upload.file_id, "a", "batch", "f", size, NOW, NOW + 100)
        storage.add(upload, record, max_files=99, max_bytes=MOST)
        upload.drop()
        assert read(storage, record.id) == content
        assert storage.content_size(record.id) == size
        with storage.open_content(record.id) as file:
            assert file.read(10) + file.readline() == content[:10] + content[10:].partition(b"\n")[0] + (
                b"\n" if b"\n" in content[10:] else b""
            )


def test_a_dropped_upload_leaves_nothing(storage):
    upload = storage.new_upload(new_file_id())
    upload.write(b"x" * CHUNK_BYTES * 2)
    upload.drop()
    upload.drop()
    with pytest.raises(NoSuchFile):
        storage.open_content(upload.file_id)
    assert storage.records.stored_bytes("a") == 0


def test_expired_files_are_neither_found_nor_kept_unless_a_batch_reads_them(storage):
    kept, dropped = stored(storage, expires=NOW + 50), stored(storage, expires=NOW + 50)
    begun(storage, kept)
    for file in (kept, dropped):
        assert storage.records.file("a", file.id, NOW) == file
        with pytest.raises(NoSuchFile):
            storage.records.file("a", file.id, NOW + 50)
    assert storage.records.files("a", NOW + 50, limit=9, after=None, is_ascending=True, purpose=None) == []
    storage.sweep(NOW + 50)
    assert storage.content_size(kept.id) == 3
    assert storage.content_size(dropped.id) is None


def test_results_are_read_after_a_restart_and_become_a_file(storage):
    lease = storage.try_lock()
    assert lease
    batch = begun(storage, stored(storage))
    storage.records.change(batch.id, BatchEvent.ACCEPT, NOW, total=3, lease=lease)
    results = storage.open_results("file-xo", lease)
    results.append(line("a"))
    results.append(line("b", 600_000) + line("c", 700_000) + line("d"))
    results.close()
    again = storage.open_results("file-xo", lease)
    content = line("a") + line("b", 600_000) + line("c", 700_000) + line("d")
    assert (again.done, again.size, again.count) == ({"a", "b", "c", "d"}, len(content), 4)
    again.append(line("e"))
    content += line("e")
    again.close()
    storage.open_results("file-xe", lease).close()
    assert storage.content_size("file-xe") == 0
    storage.discard("file-xe", lease)
    assert storage.content_size("file-xe") is None
    assert (read(storage, "file-xo"), storage.content_size("file-xo")) == (content, len(content))
    with pytest.raises(NoSuchFile):
        storage.records.file("a", "file-xo", NOW)
    file = FileRecord("file-xo", "a", "batch_output", "o", len(content), NOW, NOW + 100)
    storage.records.change(batch.id, BatchEvent.FINISH, NOW, lease=lease)
    assert storage.records.change(batch.id, BatchEvent.COMPLETE, NOW, [file], lease=lease).is_over
    assert storage.records.file("a", "file-xo", NOW) == file
    assert read(storage, "file-xo") == content
    assert storage.records.stored_bytes("a") == len(content) + 3


async def test_checks_of_long_files_delay_neither_the_lease_nor_the_api(storage, monkeypatch):
    lease, opened, ends = storage.try_lock(), list[str](), threading.Event()
    records = [begun(storage, stored(storage, tenant)) for tenant in "abcdefgh"]
    real = storage.open_content

    def slow(file_id: str) -> Any:
        opened.append(file_id)
        assert ends.wait(60)
        return real(file_id)

    monkeypatch.setattr(storage, "open_content", slow)
    parts = RunParts(
        storage, BatchConfig(None), ManualClock(), LineSlots(lambda: 1), AsyncMock(), lambda *_: None, lambda _: True,
        lambda _: 1,
    )  # fmt: skip
    runs = [asyncio.create_task(BatchRun(record, parts, lease).run()) for record in records]
    try:
        await eventually(lambda: len(opened) >= NUM_THREADS)
        async with asyncio.timeout(30):
            assert await storage.run(storage.try_lock) == lease
            assert await storage.run(storage.records.batch, "a", records[0].id) == records[0]
    finally:
        ends.set()
    await asyncio.gather(*runs)
    assert {storage.records.batch(record.tenant, record.id).status for record in records} == {BatchState.FAILED}


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["store", "delete", "begin", "refuse", "cancel", "sweep"]),
        st.sampled_from("ab"),
        st.integers(0, 7),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(OPERATIONS)
@pytest.mark.parametrize("kind", ["folder", "redis"])
def test_random_operations_agree_with_a_model(kind, server, tmp_path_factory, operations):
    """The model: files of each tenant in order, with their bytes, and the open batch of each input."""
    with pool_of(server) as made:
        storage: BatchStorage = made.open() if kind == "redis" else BatchFolder(tmp_path_factory.mktemp("model"))
        try:
            _follow(storage, operations)
            assert made.reasons == []
        finally:
            storage.close()


def _follow(storage: BatchStorage, operations: list[tuple[str, str, int]]) -> None:
    files: dict[str, list[FileRecord]] = {"a": [], "b": []}
    batches: dict[str, list[BatchRecord]] = {"a": [], "b": []}
    for what, tenant, number in operations:
        mine, open_batches = files[tenant], batches[tenant]
        readers = {batch.input_file_id for batch in open_batches}
        if what == "store":
            full = len(mine) >= 3 or sum(file.num_bytes for file in mine) + number > 10
            try:
                mine.append(stored(storage, tenant, number))
                assert not full
            except Overloaded:
                assert full
        elif what == "sweep":
            storage.sweep(NOW)
            storage.records.drop_batches(NOW + 1)
        elif what == "delete" and mine:
            file = mine[number % len(mine)]
            try:
                storage.delete(tenant, file.id, NOW)
                assert file.id not in readers
                mine.remove(file)
            except WrongState:
                assert file.id in readers
        elif what == "begin" and mine:
            open_batches.append(begun(storage, mine[number % len(mine)]))
        elif what in ("refuse", "cancel") and open_batches:
            batch = open_batches[number % len(open_batches)]
            changed = storage.records.change(batch.id, BatchEvent(what), NOW)
            if changed is not None and changed.is_over:
                open_batches.remove(batch)
            else:
                assert storage.records.batch(tenant, batch.id).status is BatchState.CANCELLING
    for tenant, mine in files.items():
        assert listed(storage, tenant) == [file.id for file in mine]
        assert storage.records.stored_bytes(tenant) == sum(file.num_bytes for file in mine)
        assert all(read(storage, file.id) == b"x" * file.num_bytes for file in mine)
    expected = {batch.id for each in batches.values() for batch in each}
    assert {batch.id for batch in storage.records.open_batches()} == expected
