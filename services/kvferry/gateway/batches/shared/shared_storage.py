"""Files and batches that all gateways of a pool share, in Redis; see `BatchStorage` for the methods."""

import io
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO, ParamSpec, TypeVar, cast

from kvferry.core.errors import Unavailable
from kvferry.gateway.batches.batch_errors import check_file_room
from kvferry.gateway.batches.records import FileRecord
from kvferry.gateway.batches.shared import shared_scripts as scripts
from kvferry.gateway.batches.shared.shared_calls import SharedCalls
from kvferry.gateway.batches.shared.shared_contents import CHUNK_BYTES, ChunkReader, SharedResults, SharedUpload
from kvferry.gateway.batches.shared.shared_records import SharedRecords
from kvferry.gateway.batches.shared.shared_scripts import ScriptReply
from kvferry.gateway.batches.storage_threads import StorageThreads

LEASE_SECONDS = 10.0
"""Time after which another gateway runs the batches if the one that does has not renewed its lease."""
P = ParamSpec("P")
R = TypeVar("R")


class SharedStorage:
    """The files and batches of a pool."""

    def __init__(self, calls: SharedCalls, close: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            calls: calls scripts.
            close: closes their connections.
        """
        self._calls, self._close = calls, close
        self._threads = StorageThreads("shared batches")
        self._records = SharedRecords(calls)
        self._has_lease = False

    @property
    def name(self) -> str:
        """See `BatchStorage.name`."""
        return self._calls.server

    @property
    def exists(self) -> bool:
        """See `BatchStorage.exists`."""
        return True

    @property
    def records(self) -> SharedRecords:
        """See `BatchStorage.records`."""
        return self._records

    async def run(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """See `BatchStorage.run`."""
        return await self._threads.run(call, *args, **kwargs)

    async def run_long(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """See `BatchStorage.run_long`."""
        return await self._threads.run_long(call, *args, **kwargs)

    def new_upload(self, file_id: str) -> SharedUpload:
        """See `BatchStorage.new_upload`."""
        return SharedUpload(self._calls, file_id)

    def add(self, upload: SharedUpload, record: FileRecord, *, max_files: int, max_bytes: int) -> None:
        """See `BatchStorage.add`."""
        reply, values = upload.keep(record, max_files, max_bytes)
        if reply is ScriptReply.REFUSED:
            count, stored = values
            check_file_room(count, stored, record.num_bytes, max_files=max_files, max_bytes=max_bytes)

    def open_content(self, file_id: str) -> BinaryIO:
        """See `BatchStorage.open_content`."""
        return cast(BinaryIO, io.BufferedReader(ChunkReader(self._calls, file_id), CHUNK_BYTES))

    def content_size(self, file_id: str) -> int | None:
        """See `BatchStorage.content_size`."""
        reply, values = self._calls.run(scripts.READ, self._calls.seal.file(file_id), 0, 0)
        return int(values[2]) if reply is ScriptReply.DONE else None

    def open_results(self, file_id: str, lease: int) -> SharedResults:
        """See `BatchStorage.open_results`."""
        return SharedResults(self._calls, file_id, lease)

    def discard(self, file_id: str, lease: int) -> None:
        """See `BatchStorage.discard`."""
        self._calls.run(scripts.DISCARD, self._calls.seal.file(file_id), self._calls.gateway, lease)

    def delete(self, tenant: str, file_id: str, now: float) -> None:
        """See `BatchStorage.delete`."""
        self._records.delete_file(tenant, file_id, now)

    def try_lock(self) -> int:
        """See `BatchStorage.try_lock`."""
        _, (number,) = self._calls.run(scripts.LEASE, self._calls.gateway, round(1e3 * LEASE_SECONDS))
        self._has_lease = bool(number)
        return int(number)

    def sweep(self, now: float) -> None:
        """See `BatchStorage.sweep`."""
        self._records.drop_expired(now)

    def close(self) -> None:
        """See `BatchStorage.close`. Blocks for about 2 seconds if Redis does not answer."""
        self._threads.shutdown()
        if self._has_lease:
            self._has_lease = False
            with suppress(Unavailable):  # the lease ends by itself
                self._calls.run(scripts.RELEASE, self._calls.gateway)
        self._close()
