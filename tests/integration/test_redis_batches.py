"""Files and batches in Redis: several gateways, leases, sealed chunks, bounds, lost results, and a server that is
full, a replica, or gone."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness.servers.batch_pool import MOST, NOW, Pool, begun, line, listed, member, pool_of, read, stored
from harness.servers.redis_server import RedisServer, redis_server

from kvferry.core.errors import Unavailable
from kvferry.gateway.batches.batch_errors import LeaseLost, NoSuchFile, ResultsLost, WrongState
from kvferry.gateway.batches.batch_run import BatchRun, LineAnswer, RunParts
from kvferry.gateway.batches.line_slots import LineSlots
from kvferry.gateway.batches.records import BatchRecord, new_file_id, result_ids
from kvferry.gateway.batches.shared.shared_calls import SharedCalls
from kvferry.gateway.batches.shared.shared_contents import CHUNK_BYTES, UPLOAD_SECONDS
from kvferry.gateway.batches.shared.shared_storage import LEASE_SECONDS, SharedStorage
from kvferry.gateway.batches.states import BatchEvent, BatchState
from kvferry.gateway.decide.config import BatchConfig
from kvferry.gateway.state.blocking_client import BlockingStateClient
from kvferry.gateway.state.pool_seal import PoolSeal
from kvferry.gateway.state.state_url import parse_state_url


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server(policy="noeviction") as running:
        yield running


@pytest.fixture
def pool(server: RedisServer) -> Iterator[Pool]:
    with pool_of(server) as made:
        yield made


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


def test_an_input_whose_batch_the_server_has_lost_can_be_deleted(pool, monkeypatch):
    storage = pool.open()
    file = stored(storage)
    lost = begun(storage, file)
    assert pool.server.ask(b"DEL", PoolSeal(b"k" * 32).prefix + b"f:b:" + PoolSeal(b"k" * 32).batch(lost.id)) == 1
    batches, added = storage.records.open_batches, list[BatchRecord]()

    def late() -> Sequence[BatchRecord]:
        found = batches()
        if not added:
            added.append(begun(storage, file))
        return found

    monkeypatch.setattr(storage.records, "open_batches", late)
    with pytest.raises(WrongState, match="input of batch"):  # begun between the look and the deletion
        storage.delete("a", file.id, NOW)
    storage.records.change(added[0].id, BatchEvent.REFUSE, NOW)
    storage.delete("a", file.id, NOW)
    assert listed(storage) == []


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
    with pytest.raises(ResultsLost, match="lost"):
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
