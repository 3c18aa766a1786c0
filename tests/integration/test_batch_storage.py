"""Files and batches: one suite over the folder and a real Redis, and what only the latter has: several gateways,
leases, sealed chunks, bounds, and a server that is full, a replica, gone, or written to by others."""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from harness.servers.redis_server import RedisServer, redis_server
from harness.waiting import eventually
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.clock import ManualClock
from kvferry.core.errors import KvferryError, Overloaded, Unavailable
from kvferry.gateway.batches import storage as stores
from kvferry.gateway.batches.batch_errors import LeaseLost, NoSuchBatch, NoSuchFile, WrongState
from kvferry.gateway.batches.batch_run import BatchRun, LineAnswer, RunParts
from kvferry.gateway.batches.folder import BatchFolder
from kvferry.gateway.batches.line_slots import LineSlots
from kvferry.gateway.batches.records import BatchRecord, FileRecord, new_batch_id, new_file_id, result_ids
from kvferry.gateway.batches.shared.shared_calls import SharedCalls
from kvferry.gateway.batches.shared.shared_contents import CHUNK_BYTES, UPLOAD_SECONDS
from kvferry.gateway.batches.shared.shared_storage import LEASE_SECONDS, SharedStorage
from kvferry.gateway.batches.states import BATCH_MACHINE, BatchEvent, BatchState
from kvferry.gateway.batches.storage import BatchStorage
from kvferry.gateway.batches.storage_threads import NUM_THREADS
from kvferry.gateway.decide.config import BatchConfig
from kvferry.gateway.state.blocking_client import BlockingStateClient
from kvferry.gateway.state.pool_seal import PoolSeal
from kvferry.gateway.state.state_url import parse_state_url

NOW = 1_700_000_000
MOST = 64 << 20


@dataclass
class Pool:
    """Opens the storages of several gateways in one Redis."""

    server: RedisServer
    clock: ManualClock
    opened: list[SharedStorage]
    reasons: list[str]

    def open(self, gateway: str = "a", key: bytes = b"k" * 32, most: int = MOST) -> SharedStorage:
        client = BlockingStateClient(parse_state_url(f"redis://127.0.0.1:{self.server.port}/0"), self.clock, "files")
        calls = SharedCalls(
            client, PoolSeal(key), gateway, most, self.clock, on_failure=self.reasons.append, wall_ms=self.now_ms
        )
        self.opened.append(SharedStorage(calls, client.close))
        return self.opened[-1]

    def now_ms(self) -> int:
        return round(1e3 * (NOW + self.clock.monotonic()))

    def names(self) -> list[bytes]:
        found = self.server.ask(b"KEYS", b"*:f:*")
        assert isinstance(found, list)
        return sorted(found)


@contextmanager
def pool_of(server: RedisServer) -> Iterator[Pool]:
    server.ask(b"FLUSHALL")
    clock = ManualClock()
    clock.advance(-clock.monotonic())
    made = Pool(server, clock, [], [])
    try:
        yield made
    finally:
        for storage in made.opened:
            storage.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server(policy="noeviction") as running:
        yield running


@pytest.fixture
def pool(server: RedisServer) -> Iterator[Pool]:
    with pool_of(server) as made:
        yield made


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


def stored(
    storage: BatchStorage, tenant: str = "a", size: int = 3, expires: int = NOW + 100, content: bytes | None = None
) -> FileRecord:
    upload, content = storage.new_upload(new_file_id()), b"x" * size if content is None else content
    most = max(10, len(content)) if len(content) > 100 else 10
    try:
        upload.write(content)
        record = FileRecord(upload.file_id, tenant, "batch", "f", len(content), NOW, expires)
        storage.add(upload, record, max_files=3, max_bytes=most)
    finally:
        upload.drop()
    return record


def begun(storage: BatchStorage, file: FileRecord) -> BatchRecord:
    record = BatchRecord(
        new_batch_id(), file.tenant, "/v1/embeddings", file.id, BatchState.VALIDATING, NOW, {}, output_seconds=3600
    )
    storage.records.add_batch(record)
    return record


def listed(storage: BatchStorage, tenant: str = "a", **changes: Any) -> list[str]:
    given: dict[str, Any] = {"limit": 10, "after": None, "is_ascending": True, "purpose": None, **changes}
    return [record.id for record in storage.records.files(tenant, NOW, **given)]


def read(storage: BatchStorage, file_id: str) -> bytes:
    with storage.open_content(file_id) as file:
        return file.read()


def line(name: str, size: int = 0) -> bytes:
    return json.dumps({"custom_id": name, "text": "." * size}).encode() + b"\n"


def member(storage: SharedStorage, file_id: str) -> bytes:
    """Return the key of a file."""
    seal = PoolSeal(b"k" * 32)
    return seal.prefix + b"f:o:" + seal.file(file_id)


# -- both ----------------------------------------------------------------------------------------------------------


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


# -- Redis ---------------------------------------------------------------------------------------------------------


def test_one_gateway_at_a_time_has_the_lease_and_a_lost_one_is_replaced(pool):
    first, second = pool.open("a"), pool.open("b")
    number = first.try_lock()
    assert number > 0
    assert second.try_lock() == 0
    pool.clock.advance(LEASE_SECONDS - 1)
    assert first.try_lock() == number
    pool.clock.advance(LEASE_SECONDS - 1)
    assert second.try_lock() == 0
    pool.clock.advance(1)
    later = second.try_lock()
    assert later > number
    assert first.try_lock() == 0
    second.close()
    assert first.try_lock() > later, "a gateway that ends gives the lease back"


def test_a_gateway_that_was_paused_writes_nothing(pool):
    paused, other = pool.open("a"), pool.open("b")
    lease, batch = paused.try_lock(), begun(paused, stored(paused))
    paused.records.change(batch.id, BatchEvent.ACCEPT, NOW, total=2, lease=lease)
    results = paused.open_results("file-xo", lease)
    results.append(line("a"))
    pool.clock.advance(LEASE_SECONDS)
    later = other.try_lock()
    for write in (
        lambda: results.append(line("b")),
        lambda: paused.open_results("file-xo", lease),
        lambda: paused.records.change(batch.id, None, NOW, completed=1, lease=lease),
        lambda: paused.records.change(batch.id, BatchEvent.FINISH, NOW, lease=lease),
        lambda: paused.discard("file-xo", lease),
    ):
        with pytest.raises(LeaseLost):
            write()
    assert pool.reasons == ["fenced"] * 5
    going_on = other.open_results("file-xo", later)
    assert going_on.done == {"a"}
    going_on.append(line("b"))
    assert read(paused, "file-xo") == line("a") + line("b")
    assert paused.records.change(batch.id, BatchEvent.CANCEL, NOW).status is BatchState.CANCELLING, "no run's write"


def test_a_line_whose_answer_was_lost_is_there_once(pool, monkeypatch):
    storage = pool.open()
    lease = storage.try_lock()
    results = storage.open_results("file-xo", lease)
    calls, real = storage._calls, storage._calls.run

    def lost(*arguments: Any, **more: Any) -> Any:
        real(*arguments, **more)
        monkeypatch.setattr(calls, "run", real)
        raise Unavailable("no answer")

    monkeypatch.setattr(calls, "run", lost)
    with pytest.raises(Unavailable):
        results.append(line("a") + line("b"))
    results.append(line("a") + line("b") + line("c"))
    results.append(line("d"))
    assert read(storage, "file-xo") == line("a") + line("b") + line("c") + line("d")
    assert (results.count, results.size) == (4, 4 * len(line("a")))


def test_an_opening_refuses_the_writes_of_earlier_ones(pool):
    storage = pool.open()
    lease = storage.try_lock()
    first = storage.open_results("file-xo", lease)
    storage.open_results("file-xo", lease).append(line("a"))
    with pytest.raises(LeaseLost):
        first.append(line("a"))


def test_an_upload_that_is_not_completed_expires(pool):
    storage = pool.open()
    upload = storage.new_upload(new_file_id())
    upload.write(b"x" * CHUNK_BYTES)
    pool.clock.advance(UPLOAD_SECONDS)
    storage.sweep(NOW + UPLOAD_SECONDS)
    with pytest.raises(Unavailable, match="send the file again"):
        upload.write(b"x" * CHUNK_BYTES)
    assert [key for key in pool.names() if b":o:" in key] == []
    assert pool.server.ask(b"HGET", pool.names()[0], b"all") == b"0"


def test_a_full_store_refuses_uploads_and_never_evicts(pool):
    storage = pool.open(most=8 * CHUNK_BYTES)
    kept = stored(storage, content=b"k" * (5 * CHUNK_BYTES))
    with pytest.raises(Unavailable, match="state_file_bytes") as refused:
        stored(storage, "b", content=b"b" * (3 * CHUNK_BYTES))
    assert (refused.value.http_status, refused.value.field) == (503, "state_file_bytes")
    assert read(storage, kept.id) == b"k" * (5 * CHUNK_BYTES)
    lease = storage.try_lock()
    storage.open_results("file-xo", lease).append(line("a", CHUNK_BYTES))
    assert pool.reasons == ["full"]
    storage.delete("a", kept.id, NOW)
    stored(storage, "b", content=b"b" * (3 * CHUNK_BYTES))


def test_another_pool_reads_nothing_and_moved_chunks_do_not_open(pool):
    storage, foreign = pool.open(), pool.open(key=b"o" * 32)
    first = stored(storage, content=b"1" * (2 * CHUNK_BYTES))
    second = stored(storage, "b", content=b"2" * (2 * CHUNK_BYTES))
    assert listed(foreign) == []
    with pytest.raises(NoSuchFile):
        foreign.open_content(first.id)
    one, two = member(storage, first.id), member(storage, second.id)
    chunk = pool.server.ask_whole(b"HGET", one, b"1")
    for key, field in ((two, b"1"), (one, b"0")):
        before = pool.server.ask_whole(b"HGET", key, field)
        pool.server.ask(b"HSET", key, field, chunk)
        with pytest.raises(Unavailable, match="not what was stored"):
            read(storage, first.id if key == one else second.id)
        pool.server.ask(b"HSET", key, field, before)
    pool.server.ask(b"HSET", one, b"c", b"1")
    with pytest.raises(Unavailable, match="not what was stored"):
        read(storage, first.id)
    pool.server.ask(b"HSET", one, b"r", pool.server.ask_whole(b"HGET", two, b"r"))
    with pytest.raises(NoSuchFile):
        storage.records.file("b", first.id, NOW)
    assert set(pool.reasons) == {"foreign"}


def test_redis_sees_neither_tenants_nor_names_nor_contents(pool):
    storage = pool.open()
    file = stored(storage, "secret-tenant", content=b"secret content " * 20)
    batch = begun(storage, file)
    seen = b"".join(pool.names())
    for key in pool.names():
        if pool.server.ask(b"TYPE", key) == b"hash":
            seen += b"".join(pool.server.ask(b"HGETALL", key))
        else:
            seen += b"".join(pool.server.ask(b"ZRANGE", key, b"0", b"-1"))
    for secret in (b"secret", file.id.encode(), batch.id.encode(), b"embeddings"):
        assert secret not in seen


def test_everything_of_a_deleted_file_and_batch_is_gone(pool):
    storage = pool.open()
    file = stored(storage, content=b"x" * 1000)
    batch = begun(storage, file)
    storage.records.change(batch.id, BatchEvent.REFUSE, NOW)
    storage.delete("a", file.id, NOW)
    storage.records.drop_batches(NOW + 1)
    assert [key.rpartition(b":f:")[2] for key in pool.names()] == [b"bytes"]
    assert pool.server.ask(b"HGETALL", pool.names()[0]) == [b"all", b"0", b"number", b"2"]


def test_a_server_without_memory_refuses_uploads_and_still_reads_cancels_and_deletes(pool):
    storage = pool.open()
    file = stored(storage, content=b"x" * 1000)
    batch, lease = begun(storage, file), storage.try_lock()
    pool.server.ask(b"CONFIG", b"SET", b"maxmemory", b"1")
    try:
        for write in (lambda: stored(storage, "b"), lambda: storage.open_results("file-xo", lease)):
            with pytest.raises(Unavailable, match=r"OutOfMemoryError|OOM") as refused:
                write()
            assert refused.value.retry_after_seconds is not None
        assert read(storage, file.id) == b"x" * 1000
        assert storage.try_lock() == lease
        assert storage.records.change(batch.id, BatchEvent.CANCEL, NOW).status is BatchState.CANCELLING
        storage.records.change(batch.id, BatchEvent.STOP, NOW)
        storage.delete("a", file.id, NOW)
    finally:
        pool.server.ask(b"CONFIG", b"SET", b"maxmemory", b"1gb")


def test_a_replica_refuses_by_name(pool):
    storage = pool.open()
    pool.server.ask(b"REPLICAOF", b"127.0.0.1", b"1")
    try:
        with pytest.raises(Unavailable, match=r"ReadOnly|READONLY"):
            stored(storage)
    finally:
        pool.server.ask(b"REPLICAOF", b"NO", b"ONE")
    stored(storage)


def test_a_lost_server_is_refused_at_once_and_one_without_its_data_begins_anew():
    with redis_server() as server, pool_of(server) as pool:
        storage = pool.open()
        lease, file = storage.try_lock(), stored(storage)
        results = storage.open_results("file-xo", lease)
        upload = storage.new_upload(new_file_id())
        upload.write(b"x" * CHUNK_BYTES)
        server.kill()
        attempts: list[Callable[[], Any]] = [
            lambda: storage.records.file("a", file.id, NOW),
            lambda: storage.try_lock(),
            lambda: results.append(line("a")),
            lambda: upload.write(b"x" * CHUNK_BYTES),
        ]
        for attempt in attempts:
            with pytest.raises(Unavailable) as refused:
                attempt()
            assert (refused.value.http_status, refused.value.field) == (503, "state")
        with redis_server(port=server.port) as again:
            pool.clock.advance(5)
            with pytest.raises(NoSuchFile):
                storage.records.file("a", file.id, NOW)
            assert storage.try_lock() > lease, "runs that began before are fenced"
            with pytest.raises(LeaseLost):
                results.append(line("a"))
            with pytest.raises(Unavailable, match="Redis has lost it"):
                upload.write(b"x" * CHUNK_BYTES)
            stored(storage)
            assert again.process.poll() is None


def attempted(attempts: "list[Callable[[], Any]]") -> None:
    """Call each of them; all may fail, but only with errors of the API."""
    for attempt in attempts:
        with suppress(KvferryError):
            attempt()


def used(storage: SharedStorage, tenant: str, file: FileRecord, batch: BatchRecord, lease: int) -> None:
    """Use each part of a file and its batch."""
    records = storage.records
    attempted([
        lambda: read(storage, file.id),
        lambda: storage.content_size(file.id),
        lambda: listed(storage, tenant, after=file.id),
        lambda: records.file(tenant, file.id, NOW),
        lambda: records.batch(tenant, batch.id),
        lambda: records.batches(tenant, limit=9, after=None),
        lambda: records.batches(tenant, limit=9, after=batch.id),
        lambda: storage.open_results("file-xo", lease).append(line("z")),
        lambda: records.change(batch.id, BatchEvent.ACCEPT, NOW, total=1, lease=lease),
        lambda: records.change(batch.id, BatchEvent.CANCEL, NOW),
        lambda: records.change(batch.id, BatchEvent.STOP, NOW, lease=lease),
        lambda: storage.delete(tenant, file.id, NOW),
    ])  # fmt: skip


def assert_serves(storage: SharedStorage, tenant: str, lease: int) -> None:
    """Check that a tenant's files and batches are created, run, listed, dropped and deleted."""
    file = stored(storage, tenant)
    batch = begun(storage, file)
    assert batch in storage.records.open_batches()
    storage.sweep(NOW + 60)
    assert storage.records.change(batch.id, BatchEvent.REFUSE, NOW, lease=lease).is_over
    storage.records.drop_batches(NOW + 1)
    assert storage.records.batches(tenant, limit=9, after=None) == []
    assert listed(storage, tenant) == [file.id]
    storage.delete(tenant, file.id, NOW)


def damaged(pool: Pool) -> Iterator[tuple[SharedStorage, FileRecord, BatchRecord, int]]:
    """Yield a store with expired files, a batch that is over, one that is not, and results of a tenant, again and again
    until each of its keys has been of another type, and each of its fields something else and missing."""
    for number in range(100):
        pool.server.ask(b"FLUSHALL")
        storage = pool.open()
        lease = storage.try_lock()
        old = begun(storage, stored(storage, expires=NOW + 50))
        storage.records.change(old.id, BatchEvent.REFUSE, NOW)
        file = stored(storage, expires=NOW + 50)
        batch = begun(storage, file)
        storage.open_results("file-xo", lease).append(line("a"))
        mine = [key for key in pool.names() if re.search(rb":f:[obuvw]:", key)]
        cases: list[tuple[list[bytes], ...]] = [([b"DEL", key], [b"RPUSH", key, b"x"]) for key in mine]
        fields = {field for key in mine if pool.server.ask(b"TYPE", key) == b"hash" for field in fields_of(pool, key)}
        for field in sorted(fields):
            having = [key for key in mine if field in fields_of(pool, key)]
            cases.append(tuple([b"HSET", key, field, b"garbage"] for key in having))
            cases.append(tuple([b"HDEL", key, field] for key in having))
        if number >= len(cases):
            return
        for command in cases[number]:
            pool.server.ask(*command)
        yield storage, file, batch, lease
        storage.close()
    raise AssertionError("there are more cases than expected")


def fields_of(pool: Pool, key: bytes) -> list[bytes]:
    found = pool.server.ask(b"HKEYS", key) if pool.server.ask(b"TYPE", key) == b"hash" else []
    assert isinstance(found, list)
    return found


def test_damaged_values_of_a_tenant_do_not_reach_the_others(pool):
    cases = 0
    for storage, _, _, lease in damaged(pool):
        assert_serves(storage, "b", lease)
        cases += 1
    assert cases > 20


def test_damaged_values_are_errors_of_the_api(pool):
    for storage, file, batch, lease in damaged(pool):
        used(storage, "a", file, batch, lease)
        assert_serves(storage, "b", lease)


def rolled_back(pool: Pool, file_id: str) -> None:
    """Let Redis lose the last chunk of a file, as a restart with its last saved state does."""
    key = PoolSeal(b"k" * 32)
    name = key.prefix + b"f:o:" + key.file(file_id)
    last = int(bytes(pool.server.ask(b"HGET", name, b"c"))) - 1  # type: ignore[call-overload]
    chunk = pool.server.ask_whole(b"HGET", name, b"%d" % last)
    assert chunk is not None
    pool.server.ask(b"HSET", name, b"c", b"%d" % last)
    pool.server.ask(b"HDEL", name, b"%d" % last)
    pool.server.ask(b"HINCRBY", name, b"z", b"-%d" % (len(chunk) - 28 - 2))  # nonce, tag, and msgpack's head


@pytest.mark.parametrize("when", ["before the second line", "after the last line"])
async def test_lines_whose_results_redis_has_lost_are_computed_again(pool, when):
    storage = pool.open()
    request = {"method": "POST", "url": "/v1/embeddings", "body": {"model": "m"}}
    content = b"".join(json.dumps({"custom_id": name, **request}).encode() + b"\n" for name in "ab")
    batch = begun(storage, stored(storage, content=content))
    calls, losses, lease = list[str](), [when], storage.try_lock()

    async def call(_tenant: str, _path: str, body: bytes) -> LineAnswer:
        calls.append("")
        if len(calls) == 2 and losses == ["before the second line"]:
            losses.clear()
            rolled_back(pool, result_ids(batch.id)[0])
        return LineAnswer(200, "r", b"{}")

    def on_line(_outcome: str) -> None:
        if len(calls) == 2 and losses == ["after the last line"]:
            losses.clear()
            rolled_back(pool, result_ids(batch.id)[0])

    parts = RunParts(
        storage, BatchConfig(None), pool.clock, LineSlots(lambda: 1), call, lambda *_: None, lambda _: True,
        lambda _: 1, on_line,
    )  # fmt: skip
    with pytest.raises(LeaseLost, match="lost"):
        await BatchRun(batch, parts, lease).run()
    (again,) = storage.records.open_batches()
    await BatchRun(again, parts, lease).run()
    done = storage.records.batch("a", batch.id)
    assert (done.status, done.completed, done.failed) == (BatchState.COMPLETED, 2, 0)
    found = [json.loads(text)["custom_id"] for text in read(storage, done.output_file_id or "").splitlines()]
    assert sorted(found) == ["a", "b"]


def test_the_documented_rights_of_a_user_suffice(tmp_path):
    rights = re.search(r"resetkeys ([^`]*)`", (Path(__file__).parents[2] / "docs" / "resuming.md").read_text("utf-8"))
    assert rights is not None
    user = "gateway on >secret resetkeys " + " ".join(rights[1].split())
    with redis_server(acl=("default on nopass ~* &* +@all", user)) as server, pool_of(server) as pool:
        url = f"redis://gateway:secret@127.0.0.1:{server.port}/0"
        client = BlockingStateClient(parse_state_url(url), pool.clock, "files")
        storage = SharedStorage(SharedCalls(client, PoolSeal(b"k" * 32), "a", MOST, pool.clock), client.close)
        pool.opened.append(storage)
        now = int(pool.clock.wall())
        file, lease = stored(storage, expires=now + 100), storage.try_lock()
        batch = begun(storage, file)
        results = storage.open_results("file-xo", lease)
        results.append(line("a"))
        storage.discard("file-xo", lease)
        storage.records.change(batch.id, BatchEvent.REFUSE, NOW, lease=lease)
        storage.sweep(NOW)
        storage.records.drop_batches(NOW + 1)
        assert len(storage.records.batches("a", limit=1, after=None)) == 0
        assert read(storage, file.id) == b"xxx"
        storage.delete("a", file.id, NOW)
