"""The folder of files and batches: contents of files, uploads, the database, and the lock of the process that runs
batches.

FOLDER/records.sqlite   FOLDER/runner.lock   FOLDER/files/ID   FOLDER/uploads/ID

Methods other than `run` block, and may be called on any thread. The folder is created by the first call that uses the
records.
"""

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, ParamSpec, TypeVar

from kvferry.core.errors import Unavailable
from kvferry.gateway.batches.batch_errors import FOLDER_SETTING, NoSuchFile
from kvferry.gateway.batches.records import FileRecord, result_ids
from kvferry.gateway.batches.result_file import ResultFile
from kvferry.gateway.batches.sqlite_records import SqliteRecords
from kvferry.gateway.batches.storage_threads import StorageThreads

P = ParamSpec("P")
R = TypeVar("R")
_ABANDONED_SECONDS = 2 * 3600
"""Time since its last change after which a file without a record is deleted; no upload takes so long."""


class FolderUpload:
    """A file that is being received; see `UploadWriter`."""

    def __init__(self, path: Path) -> None:
        self.path, self.file_id = path, path.name
        self.num_bytes = 0
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")

    def write(self, data: bytes) -> None:
        """See `UploadWriter.write`."""
        with folder_errors():
            self._file.write(data)
            self.num_bytes += len(data)

    def keep(self, path: Path) -> None:
        """Sync the file and move it to its final path.

        Raises:
            Unavailable: the disk is full, or the file cannot be written.
        """
        with folder_errors():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.rename(self.path, path)

    def drop(self) -> None:
        """See `UploadWriter.drop`."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


class BatchFolder:
    """One folder, which several gateway processes may use."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: the folder; it may be missing.
        """
        self.path = path
        self._lock = threading.Lock()
        self._records: SqliteRecords | None = None
        self._threads = StorageThreads("batch folder")
        self._runner = -1
        """Descriptor of the locked file; -1 if this process does not run batches."""

    async def run(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """See `BatchStorage.run`."""
        return await self._threads.run(call, *args, **kwargs)

    async def run_long(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """See `BatchStorage.run_long`."""
        return await self._threads.run_long(call, *args, **kwargs)

    @property
    def name(self) -> str:
        """See `BatchStorage.name`."""
        return str(self.path)

    @property
    def exists(self) -> bool:
        """Whether there are records."""
        return (self.path / "records.sqlite").exists()

    @property
    def is_runner(self) -> bool:
        """Whether this process has the lock."""
        return self._runner >= 0

    @property
    def records(self) -> SqliteRecords:
        """The records; the first use creates the folder.

        Raises:
            Unavailable: the folder cannot be used.
        """
        with self._lock:
            if self._records is None:
                with folder_errors():
                    self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                    for name in ("files", "uploads"):
                        (self.path / name).mkdir(mode=0o700, exist_ok=True)
                    (self.path / "records.sqlite").touch(mode=0o600)
                self._records = SqliteRecords(self.path / "records.sqlite")
            return self._records

    def content(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self.path / "files" / file_id

    def new_upload(self, file_id: str) -> FolderUpload:
        """See `BatchStorage.new_upload`."""
        _ = self.records
        with folder_errors():
            return FolderUpload(self.path / "uploads" / file_id)

    def add(self, upload: FolderUpload, record: FileRecord, *, max_files: int, max_bytes: int) -> None:
        """See `BatchStorage.add`."""
        path = self.content(record.id)
        upload.keep(path)
        try:
            self.records.add_file(record, max_files=max_files, max_bytes=max_bytes)
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise

    def open_content(self, file_id: str) -> BinaryIO:
        """See `BatchStorage.open_content`."""
        with folder_errors():
            try:
                return os.fdopen(os.open(self.content(file_id), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb")
            except FileNotFoundError:
                raise NoSuchFile(f"file {file_id!r} was deleted", field="file_id") from None

    def content_size(self, file_id: str) -> int | None:
        """See `BatchStorage.content_size`."""
        try:
            return self.content(file_id).stat().st_size
        except FileNotFoundError:
            return None

    def open_results(self, file_id: str, _lease: int) -> ResultFile:
        """See `BatchStorage.open_results`."""
        return ResultFile(self.content(file_id))

    def discard(self, file_id: str, _lease: int) -> None:
        """See `BatchStorage.discard`."""
        self.content(file_id).unlink(missing_ok=True)

    def delete(self, tenant: str, file_id: str, now: float) -> None:
        """See `BatchStorage.delete`."""
        self.records.delete_file(tenant, file_id, now)
        with suppress(OSError):
            self.content(file_id).unlink()

    def try_lock(self) -> int:
        """See `BatchStorage.try_lock`; the kernel keeps the lock until the process ends."""
        with self._lock:
            if self._runner >= 0:
                return 1
            with folder_errors():
                found = os.open(self.path / "runner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(found)
                return 0
            self._runner = found
            return 1

    def sweep(self, now: float) -> None:
        """Delete expired files, and contents without a record that have not changed for two hours.

        Args:
            now: Unix time in seconds.
        """
        for file_id in self.records.drop_expired(now):
            with suppress(OSError):
                self.content(file_id).unlink()
        known = set(self.records.file_ids())
        for batch in self.records.open_batches():
            known.update(result_ids(batch.id))
        with folder_errors():
            for folder in ("files", "uploads"):
                for entry in os.scandir(self.path / folder):
                    with suppress(OSError):
                        if entry.name not in known and entry.stat().st_mtime < now - _ABANDONED_SECONDS:
                            os.unlink(entry.path)

    def close(self) -> None:
        """Close the database, return the lock, and end the threads."""
        self._threads.shutdown()
        with self._lock:
            if self._records is not None:
                self._records.close()
                self._records = None
            if self._runner >= 0:
                os.close(self._runner)
                self._runner = -1


@contextmanager
def folder_errors() -> Iterator[None]:
    """Convert errors of the operating system; the message does not reveal the path, since clients see it.

    Raises:
        Unavailable: the folder cannot be used.
    """
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"{FOLDER_SETTING}: the folder of files cannot be used: {error.strerror}; the gateway's administrator must "
            "set a folder with free space that its user may write",
            field=FOLDER_SETTING,
        ) from error
