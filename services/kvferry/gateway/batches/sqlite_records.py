"""The records of files and batches in a SQLite database, which several gateway processes may use at a time.

Methods block, and may be called on any thread. A tenant sees only its own records.
"""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvferry.core.errors import Unavailable
from kvferry.gateway.batches import storage
from kvferry.gateway.batches.batch_errors import (
    FOLDER_SETTING,
    NoSuchFile,
    check_file_room,
    is_input,
    no_batch,
    no_file,
    no_place,
    too_many_open,
)
from kvferry.gateway.batches.records import BatchRecord, FileRecord
from kvferry.gateway.batches.states import BatchEvent

_BUSY_SECONDS = 5.0
"""Time for which a call waits for another process that writes."""
_NO_LIMIT = 1 << 62
_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL, purpose TEXT NOT NULL,
    filename TEXT NOT NULL, num_bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL, is_over INTEGER NOT NULL,
    created_at INTEGER NOT NULL, input_file_id TEXT NOT NULL, record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS files_of_tenants ON files (tenant, number);
CREATE INDEX IF NOT EXISTS batches_of_tenants ON batches (tenant, number);
CREATE INDEX IF NOT EXISTS open_batches ON batches (is_over, number);
"""
_LIST_FILES = """
SELECT id, tenant, purpose, filename, num_bytes, created_at, expires_at FROM files
WHERE tenant = :tenant AND expires_at > :now AND (:purpose IS NULL OR purpose = :purpose) AND number > :low
    AND number < :high
"""
_OLDEST_FIRST, _NEWEST_FIRST = "ORDER BY number ASC LIMIT :limit", "ORDER BY number DESC LIMIT :limit"


class SqliteRecords:
    """The records of one folder."""

    def __init__(self, path: Path) -> None:
        """Open the database, and create it if there is none.

        Args:
            path: the database file.

        Raises:
            Unavailable: the file cannot be used.
        """
        self._lock = threading.Lock()
        with self._errors():
            # autocommit; `_changing` begins transactions
            self._db = sqlite3.connect(path, _BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            try:
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.executescript(_TABLES)
            except BaseException:
                self._db.close()
                raise

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()

    # -- files -------------------------------------------------------------------------------------------------

    def add_file(self, record: FileRecord, *, max_files: int, max_bytes: int) -> None:
        """Add a file; see `BatchStorage.add`."""
        with self._changing() as db:
            self._check_room(db, record.tenant, record.num_bytes, max_files, max_bytes)
            _insert_file(db, record)

    def check_room(self, tenant: str, num_bytes: int, *, max_files: int, max_bytes: int) -> None:
        """See `BatchRecords.check_room`."""
        with self._reading() as db:
            self._check_room(db, tenant, num_bytes, max_files, max_bytes)

    def _check_room(self, db: sqlite3.Connection, tenant: str, num_bytes: int, max_files: int, max_bytes: int) -> None:
        count, stored = db.execute(
            "SELECT COUNT(*), COALESCE(SUM(num_bytes), 0) FROM files WHERE tenant = ?", (tenant,)
        ).fetchone()
        check_file_room(count, stored, num_bytes, max_files=max_files, max_bytes=max_bytes)

    def stored_bytes(self, tenant: str) -> int:
        """See `BatchRecords.stored_bytes`."""
        with self._reading() as db:
            found = db.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM files WHERE tenant = ?", (tenant,)).fetchone()
        return int(found[0])

    def file(self, tenant: str, file_id: str, now: float, field: str = "file_id") -> FileRecord:
        """See `BatchRecords.file`."""
        with self._reading() as db:
            row = db.execute(
                "SELECT id, tenant, purpose, filename, num_bytes, created_at, expires_at FROM files "
                "WHERE id = ? AND tenant = ? AND expires_at > ?",
                (file_id, tenant, now),
            ).fetchone()
        if row is None:
            raise no_file(file_id, field)
        return FileRecord(*row)

    def files(
        self, tenant: str, now: float, *, limit: int, after: str | None, is_ascending: bool, purpose: str | None
    ) -> Sequence[FileRecord]:
        """See `BatchRecords.files`."""
        with self._reading() as db:
            place = None
            if after is not None:
                place = db.execute("SELECT number FROM files WHERE id = ? AND tenant = ?", (after, tenant)).fetchone()
                if place is None:
                    raise no_place(after, "file")
            given = {"tenant": tenant, "now": now, "purpose": purpose, "limit": limit, "low": 0, "high": _NO_LIMIT}
            if place is not None:
                given["low" if is_ascending else "high"] = place[0]
            rows = db.execute(_LIST_FILES + (_OLDEST_FIRST if is_ascending else _NEWEST_FIRST), given).fetchall()
        return [FileRecord(*row) for row in rows]

    def delete_file(self, tenant: str, file_id: str, now: float) -> None:
        """Delete the record of a file.

        Raises:
            NoSuchFile: the tenant has no such file.
            WrongState: a batch that is not over reads the file.
        """
        self.file(tenant, file_id, now)
        with self._changing() as db:
            row = db.execute("SELECT id FROM batches WHERE input_file_id = ? AND NOT is_over", (file_id,)).fetchone()
            if row is not None:
                raise is_input(file_id, row[0])
            db.execute("DELETE FROM files WHERE id = ? AND tenant = ?", (file_id, tenant))

    def drop_expired(self, now: float) -> Sequence[str]:
        """Delete the records of expired files, except for the inputs of batches that are not over; return their ids.

        Args:
            now: Unix time in seconds.
        """
        with self._changing() as db:
            rows = db.execute(
                "DELETE FROM files WHERE expires_at <= ? AND id NOT IN "
                "(SELECT input_file_id FROM batches WHERE NOT is_over) RETURNING id",
                (now,),
            ).fetchall()
        return [row[0] for row in rows]

    def file_ids(self) -> frozenset[str]:
        """Return the ids of all files."""
        with self._reading() as db:
            return frozenset(row[0] for row in db.execute("SELECT id FROM files"))

    # -- batches -----------------------------------------------------------------------------------------------

    def add_batch(self, record: BatchRecord) -> None:
        """See `BatchRecords.add_batch`."""
        with self._changing() as db:
            (num_open,) = db.execute(
                "SELECT COUNT(*) FROM batches WHERE tenant = ? AND NOT is_over", (record.tenant,)
            ).fetchone()
            if num_open >= storage.MAX_OPEN_BATCHES:
                raise too_many_open(num_open, storage.MAX_OPEN_BATCHES)
            if db.execute("SELECT 1 FROM files WHERE id = ?", (record.input_file_id,)).fetchone() is None:
                raise NoSuchFile(f"file {record.input_file_id!r} does not exist", field="input_file_id")
            db.execute(
                "INSERT INTO batches (id, tenant, is_over, created_at, input_file_id, record) "
                "VALUES (?, ?, 0, ?, ?, ?)",
                (record.id, record.tenant, record.created_at, record.input_file_id, msgspec.json.encode(record)),
            )
            db.execute(
                "DELETE FROM batches WHERE tenant = ? AND is_over AND number <= "
                "(SELECT number FROM batches WHERE tenant = ? ORDER BY number DESC LIMIT 1 OFFSET ?)",
                (record.tenant, record.tenant, storage.MAX_BATCHES),
            )

    def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """See `BatchRecords.batch`."""
        with self._reading() as db:
            row = db.execute("SELECT record FROM batches WHERE id = ? AND tenant = ?", (batch_id, tenant)).fetchone()
        if row is None:
            raise no_batch(batch_id)
        return _read(row[0])

    def batches(self, tenant: str, *, limit: int, after: str | None) -> Sequence[BatchRecord]:
        """See `BatchRecords.batches`."""
        with self._reading() as db:
            place = (_NO_LIMIT,)
            if after is not None:
                place = db.execute("SELECT number FROM batches WHERE id = ? AND tenant = ?", (after, tenant)).fetchone()
                if place is None:
                    raise no_place(after, "batch")
            rows = db.execute(
                "SELECT record FROM batches WHERE tenant = ? AND number < ? ORDER BY number DESC LIMIT ?",
                (tenant, place[0], limit),
            ).fetchall()
        return [_read(row[0]) for row in rows]

    def open_batches(self) -> Sequence[BatchRecord]:
        """See `BatchRecords.open_batches`."""
        with self._reading() as db:
            rows = db.execute("SELECT record FROM batches WHERE NOT is_over ORDER BY number").fetchall()
        return [_read(row[0]) for row in rows]

    def drop_batches(self, before: float) -> None:
        """See `BatchRecords.drop_batches`."""
        with self._changing() as db:
            db.execute("DELETE FROM batches WHERE is_over AND created_at < ?", (before,))

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
        """See `BatchRecords.change`; the lock of the folder is the lease."""
        with self._changing() as db:
            row = db.execute("SELECT record FROM batches WHERE id = ?", (batch_id,)).fetchone()
            if row is None:
                return None
            record = _read(row[0])
            changed = record.changed(event, now, fields)
            if changed is None:
                return None
            for file in files:
                _insert_file(db, file)
            db.execute(
                "UPDATE batches SET is_over = ?, record = ? WHERE id = ?",
                (changed.is_over, msgspec.json.encode(changed), batch_id),
            )
        return changed

    # -- internals ---------------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._errors():
            yield self._db

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise Unavailable(
                f"{FOLDER_SETTING}: the database of files cannot be used: {error}; the gateway's administrator must "
                "set a local folder with free space that its user may write",
                field=FOLDER_SETTING,
            ) from error


def _insert_file(db: sqlite3.Connection, record: FileRecord) -> None:
    db.execute(
        "INSERT OR IGNORE INTO files (id, tenant, purpose, filename, num_bytes, created_at, expires_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        msgspec.structs.astuple(record),
    )


_decoder = msgspec.json.Decoder(BatchRecord)


def _read(record: bytes) -> BatchRecord:
    return _decoder.decode(record)
