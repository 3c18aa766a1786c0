"""The records of files and batches in Redis; see `BatchRecords` for the methods."""

from collections.abc import Sequence
from typing import Any

from kvferry.core.errors import Unavailable
from kvferry.gateway.batches import storage
from kvferry.gateway.batches.batch_errors import (
    NoSuchFile,
    check_file_room,
    is_input,
    no_batch,
    no_file,
    no_place,
    too_many_open,
)
from kvferry.gateway.batches.records import BatchRecord, FileRecord
from kvferry.gateway.batches.shared import shared_batch_scripts as batch_scripts
from kvferry.gateway.batches.shared import shared_scripts as scripts
from kvferry.gateway.batches.shared.shared_calls import SharedCalls
from kvferry.gateway.batches.shared.shared_scripts import ScriptReply
from kvferry.gateway.batches.states import BatchEvent

_PAGE = 500
_MAX_TRIES = 16
"""Maximum number of times at which a change is tried again, since another one came first."""
_MAX_ROUNDS = 1000
"""Maximum number of calls of one deletion of expired objects."""


class SharedRecords:
    """The records of a pool."""

    def __init__(self, calls: SharedCalls) -> None:
        self._calls, self._seal = calls, calls.seal

    # -- files -------------------------------------------------------------------------------------------------

    def check_room(self, tenant: str, num_bytes: int, *, max_files: int, max_bytes: int) -> None:
        """See `BatchRecords.check_room`."""
        _, (count, stored, _) = self._calls.run(scripts.TENANT_ROOM, self._seal.tenant(tenant))
        check_file_room(count, stored, num_bytes, max_files=max_files, max_bytes=max_bytes)

    def stored_bytes(self, tenant: str) -> int:
        """See `BatchRecords.stored_bytes`."""
        _, (_, stored, _) = self._calls.run(scripts.TENANT_ROOM, self._seal.tenant(tenant))
        return int(stored)

    def file(self, tenant: str, file_id: str, now: float, field: str = "file_id") -> FileRecord:
        """See `BatchRecords.file`."""
        found = self._file(tenant, file_id)
        if found is None or found[0].expires_at <= now:
            raise no_file(file_id, field)
        return found[0]

    def files(
        self, tenant: str, now: float, *, limit: int, after: str | None, is_ascending: bool, purpose: str | None
    ) -> Sequence[FileRecord]:
        """See `BatchRecords.files`."""
        low, high = b"-inf", b"+inf"
        if after is not None:
            place = self._file(tenant, after)
            if place is None:
                raise no_place(after, "file")
            low, high = (b"(%d" % place[1], high) if is_ascending else (low, b"(%d" % place[1])
        found = list[FileRecord]()
        while len(found) < limit:
            _, page = self._calls.run(
                scripts.FILES, self._seal.tenant(tenant), low, high, int(is_ascending), _PAGE
            )  # fmt: skip
            for name, sealed in zip(page[::3], page[1::3], strict=True):
                record = self._opened_file(name, sealed) if sealed else None
                if record is None or record.tenant != tenant or record.expires_at <= now:
                    continue
                if purpose is None or record.purpose == purpose:
                    found.append(record)
            if len(page) < 3 * _PAGE:
                break
            low, high = (b"(" + page[-1], high) if is_ascending else (low, b"(" + page[-1])
        return found[:limit]

    def delete_file(self, tenant: str, file_id: str, now: float) -> None:
        """Delete a file; see `BatchStorage.delete`."""
        self.file(tenant, file_id, now)
        number = b""
        for _ in range(_MAX_TRIES):
            reply, values = self._calls.run(
                scripts.DELETE, self._seal.file(file_id), self._seal.tenant(tenant), number
            )  # fmt: skip
            if reply is ScriptReply.MOVED:
                raise no_file(file_id, "file_id")
            if reply is ScriptReply.DONE:
                return
            # The server may have lost a batch that was counted as a reader, for example since it evicts.
            (number,) = values
            readers = [batch.id for batch in self.open_batches() if batch.input_file_id == file_id]
            if readers:
                raise is_input(file_id, readers[0])
        raise is_input(file_id, "unknown")

    def drop_expired(self, now: float) -> None:
        """Delete expired files, except for the inputs of batches that are not over.

        Args:
            now: Unix time in seconds.
        """
        for _ in range(_MAX_ROUNDS):
            _, (count,) = self._calls.run(scripts.EXPIRE, at_ms=int(1e3 * now))
            if not count:
                return

    # -- batches -----------------------------------------------------------------------------------------------

    def add_batch(self, record: BatchRecord) -> None:
        """See `BatchRecords.add_batch`."""
        name = self._seal.batch(record.id)
        reply, values = self._calls.run(
            batch_scripts.ADD_BATCH, name, self._seal.tenant(record.tenant), self._seal.file(record.input_file_id),
            record.created_at, storage.MAX_OPEN_BATCHES, storage.MAX_BATCHES, self._calls.upload_bytes,
            self._sealed_batch(name, record),
        )  # fmt: skip
        if reply is ScriptReply.MOVED:
            raise NoSuchFile(f"file {record.input_file_id!r} does not exist", field="input_file_id")
        if reply is ScriptReply.REFUSED:
            raise too_many_open(values[0], storage.MAX_OPEN_BATCHES)

    def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """See `BatchRecords.batch`."""
        found = self._batch(batch_id)
        if found is None or found[0].tenant != tenant:
            raise no_batch(batch_id)
        return found[0]

    def batches(self, tenant: str, *, limit: int, after: str | None) -> Sequence[BatchRecord]:
        """See `BatchRecords.batches`."""
        high = b"+inf"
        if after is not None:
            place = self._batch(after)
            if place is None or place[0].tenant != tenant:
                raise no_place(after, "batch")
            high = b"(%d" % place[2]
        _, page = self._calls.run(batch_scripts.BATCHES, self._seal.tenant(tenant), high, limit)
        found = (self._opened_batch(name, sealed) for name, sealed in zip(page[::2], page[1::2], strict=True) if sealed)
        return [record for record in found if record is not None and record.tenant == tenant]

    def open_batches(self) -> Sequence[BatchRecord]:
        """See `BatchRecords.open_batches`."""
        found, last = list[BatchRecord](), b"0"
        while True:
            _, (last, *page) = self._calls.run(batch_scripts.OPEN, last, batch_scripts.OPEN_PAGE)
            for name, sealed in zip(page[::2], page[1::2], strict=True):
                record = self._opened_batch(name, sealed)
                if record is not None:
                    found.append(record)
            if len(page) < 2 * batch_scripts.OPEN_PAGE:
                return found

    def drop_batches(self, before: float) -> None:
        """See `BatchRecords.drop_batches`."""
        for _ in range(_MAX_ROUNDS):
            _, (count,) = self._calls.run(batch_scripts.DROP_BATCHES, before)
            if not count:
                return

    def change(
        self,
        batch_id: str,
        event: BatchEvent | None,
        now: float,
        files: Sequence[FileRecord] = (),
        *,
        lease: int | None = None,
        **fields: Any,
    ) -> BatchRecord | None:
        """See `BatchRecords.change`."""
        name, visible = self._seal.batch(batch_id), list[bytes | int]()
        for file in files:
            key = self._seal.file(file.id)
            sealed = self._seal.seal(b"file:" + key).sealed(b"r", file)
            visible += [key, self._seal.tenant(file.tenant), file.num_bytes, 1000 * file.expires_at, sealed]
        for _ in range(_MAX_TRIES):
            found = self._batch(batch_id)
            changed = None if found is None else found[0].changed(event, now, fields)
            if found is None or changed is None:
                return None
            reply, _ = self._calls.run(
                batch_scripts.CHANGE, name, found[1], self._calls.gateway, b"" if lease is None else lease,
                int(changed.is_over), self._sealed_batch(name, changed), *visible,
            )  # fmt: skip
            if reply is ScriptReply.DONE:
                return changed
        raise Unavailable(f"batch {batch_id!r} was changed {_MAX_TRIES} times meanwhile; send the request again")

    # -- internals ---------------------------------------------------------------------------------------------

    def _file(self, tenant: str, file_id: str) -> tuple[FileRecord, int] | None:
        """Return a file of a tenant, and its number."""
        name = self._seal.file(file_id)
        reply, values = self._calls.run(scripts.READ, name, 0, 0)
        if reply is not ScriptReply.DONE or not values[1]:
            return None
        record = self._opened_file(name, values[1])
        return None if record is None or record.tenant != tenant else (record, int(values[3]))

    def _batch(self, batch_id: str) -> tuple[BatchRecord, bytes, int] | None:
        """Return a batch, its version and its number."""
        name = self._seal.batch(batch_id)
        reply, values = self._calls.run(batch_scripts.BATCH, name)
        record = self._opened_batch(name, values[0]) if reply is ScriptReply.DONE else None
        return None if record is None else (record, values[1], int(values[2]))

    def _opened_file(self, name: bytes, sealed: bytes) -> FileRecord | None:
        record = self._seal.seal(b"file:" + name).opened(b"r", sealed, FileRecord)
        if record is None:
            self._calls.foreign("the record of a file")
        return record

    def _sealed_batch(self, name: bytes, record: BatchRecord) -> bytes:
        return self._seal.seal(b"batch:" + name).sealed(b"r", record)

    def _opened_batch(self, name: bytes, sealed: bytes) -> BatchRecord | None:
        record = self._seal.seal(b"batch:" + name).opened(b"r", sealed, BatchRecord)
        if record is None:
            self._calls.foreign("the record of a batch")
        return record
