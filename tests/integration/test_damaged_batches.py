"""Files and batches in Redis of which another client has damaged values: the other tenants are not affected."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from harness.servers.batch_pool import NOW, Pool, begun, line, listed, pool_of, read, stored
from harness.servers.redis_server import RedisServer, redis_server

from kvferry.core.errors import KvferryError
from kvferry.gateway.batches.records import BatchRecord, FileRecord
from kvferry.gateway.batches.shared.shared_storage import SharedStorage
from kvferry.gateway.batches.states import BatchEvent


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server(policy="noeviction") as running:
        yield running


@pytest.fixture
def pool(server: RedisServer) -> Iterator[Pool]:
    with pool_of(server) as made:
        yield made


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
