"""Storages of files and batches of several gateways in one Redis, and short forms of their calls."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from harness.servers.redis_server import RedisServer
from kvferry.core.clock import ManualClock
from kvferry.gateway.batches.records import BatchRecord, FileRecord, new_batch_id, new_file_id
from kvferry.gateway.batches.shared.shared_calls import SharedCalls
from kvferry.gateway.batches.shared.shared_storage import SharedStorage
from kvferry.gateway.batches.states import BatchState
from kvferry.gateway.batches.storage import BatchStorage
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
