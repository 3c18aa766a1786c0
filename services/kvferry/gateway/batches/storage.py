"""Storage of files and batches: what its implementations have in common. No I/O.

Two implementations: `folder` for the gateways of one machine, `shared` for all gateways of a pool, in Redis.

Methods other than `run` and `run_long` block, and may be called on any thread. A run of a batch writes with the number
of the lease under which it began, and its writes are refused once another gateway has a later one.
"""

from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, ParamSpec, Protocol, TypeVar

from kvferry.gateway.batches.records import BatchRecord, FileRecord
from kvferry.gateway.batches.states import BatchEvent

MAX_OPEN_BATCHES = 32
"""Maximum number of batches of one tenant that are not over."""
MAX_BATCHES = 1000
"""Maximum number of kept batches of one tenant; the oldest ones that are over are dropped first."""
P = ParamSpec("P")
R = TypeVar("R")


class UploadWriter(Protocol):
    """A file that is being received. It leaves nothing unless it was added."""

    file_id: str
    num_bytes: int

    def write(self, data: bytes) -> None:
        """Append bytes.

        Raises:
            Unavailable: the storage is full, or cannot be written.
        """
        ...

    def drop(self) -> None:
        """Delete what was received, unless the file was added. Idempotent; raises nothing."""
        ...


class ResultLines(Protocol):
    """An output file or error file of a batch that is not over: whole lines, each of which is kept once written."""

    done: set[str]
    """Custom ids of the lines that were there when the file was opened."""
    size: int
    """Size of the lines in bytes."""
    count: int

    def append(self, lines: bytes) -> None:
        """Append whole lines; on an error they may be appended again, and are there once.

        Raises:
            OSError: the lines could not be written.
            Unavailable: likewise.
            LeaseLost: another gateway runs the batches.
            ResultsLost: the storage has lost lines that were there.
        """
        ...

    def close(self) -> None:
        """Close the file. Idempotent."""
        ...


class BatchRecords(Protocol):
    """The records of files and batches. A tenant sees only its own.

    All methods raise Unavailable if the storage cannot be used.
    """

    def check_room(self, tenant: str, num_bytes: int, *, max_files: int, max_bytes: int) -> None:
        """Check that a tenant may store a further file.

        Args:
            tenant: tenant of the caller.
            num_bytes: size of the file.
            max_files: maximum number of the tenant's files.
            max_bytes: maximum size of the tenant's files together.

        Raises:
            Overloaded: the tenant has too many files, or too large ones.
        """
        ...

    def stored_bytes(self, tenant: str) -> int:
        """Return the size of a tenant's files."""
        ...

    def file(self, tenant: str, file_id: str, now: float, field: str = "file_id") -> FileRecord:
        """Return a file.

        Args:
            tenant: tenant of the caller.
            file_id: id of the file.
            now: Unix time in seconds; an expired file is not found.
            field: field of the request that names the file.

        Raises:
            NoSuchFile: the tenant has no such file.
        """
        ...

    def files(
        self, tenant: str, now: float, *, limit: int, after: str | None, is_ascending: bool, purpose: str | None
    ) -> Sequence[FileRecord]:
        """Return up to `limit` files of a tenant.

        Args:
            tenant: tenant of the caller.
            now: Unix time in seconds; expired files are left out.
            limit: maximum number of files.
            after: id of the file before the first one; `None` to begin with the first.
            is_ascending: whether the oldest file is the first one.
            purpose: only files with this purpose; `None` for all.

        Raises:
            NoSuchFile: `after` is not the id of a file.
        """
        ...

    def add_batch(self, record: BatchRecord) -> None:
        """Add a batch. The tenant's oldest batches that are over are dropped above `MAX_BATCHES`.

        Raises:
            Overloaded: the tenant has too many batches that are not over.
            NoSuchFile: the input file was deleted meanwhile.
        """
        ...

    def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Return a batch.

        Raises:
            NoSuchBatch: the tenant has no such batch.
        """
        ...

    def batches(self, tenant: str, *, limit: int, after: str | None) -> Sequence[BatchRecord]:
        """Return up to `limit` batches of a tenant, the newest first.

        Args:
            tenant: tenant of the caller.
            limit: maximum number of batches.
            after: id of the batch before the first one; `None` to begin with the newest.

        Raises:
            NoSuchBatch: `after` is not the id of a batch.
        """
        ...

    def open_batches(self) -> Sequence[BatchRecord]:
        """Return the batches of all tenants that are not over, in order of creation."""
        ...

    def drop_batches(self, before: float) -> None:
        """Delete the batches that are over and were created before a Unix time in seconds."""
        ...

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
        """Change a batch in one transaction; return it as it is now.

        A state changes only if the table allows it: another process may have cancelled the batch meanwhile.

        Args:
            batch_id: id of the batch.
            event: changes the state; `None` for other fields of a batch in progress only.
            now: Unix time in seconds.
            files: files of results, which become visible.
            lease: number of the lease of the run that writes; `None` if no run does.
            fields: new values of further fields, which are left as they are if the event is not allowed.

        Returns:
            The batch; `None` if it does not exist or `event` is not allowed in its state.

        Raises:
            LeaseLost: another gateway runs the batches.
        """
        ...


class BatchStorage(Protocol):
    """Files and batches."""

    @property
    def name(self) -> str:
        """What it is, for the log."""
        ...

    @property
    def exists(self) -> bool:
        """Whether there may be records."""
        ...

    @property
    def records(self) -> BatchRecords:
        """The records.

        Raises:
            Unavailable: the storage cannot be used.
        """
        ...

    async def run(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that blocks on one of the storage's own threads, so that a slow one delays nothing else."""
        ...

    async def run_long(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that reads a whole file, on other threads than those of `run`."""
        ...

    def new_upload(self, file_id: str) -> UploadWriter:
        """Begin an upload.

        Raises:
            Unavailable: the storage cannot be used.
        """
        ...

    def add(self, upload: Any, record: FileRecord, *, max_files: int, max_bytes: int) -> None:
        """Store a received file.

        Args:
            upload: what `new_upload` of this storage returned.
            record: the file.
            max_files: maximum number of the tenant's files.
            max_bytes: maximum size of the tenant's files together.

        Raises:
            Overloaded: the tenant has too many files, or too large ones.
            Unavailable: the storage is full, or cannot be written.
        """
        ...

    def open_content(self, file_id: str) -> BinaryIO:
        """Open the content of a file, to be read from its beginning. The caller closes it; its reads block.

        Raises:
            NoSuchFile: there is no such file.
            Unavailable: the file cannot be read; reads raise it as well.
        """
        ...

    def content_size(self, file_id: str) -> int | None:
        """Return the size of a content in bytes; `None` if there is none."""
        ...

    def open_results(self, file_id: str, lease: int) -> ResultLines:
        """Open or create a file of results, after what was written before.

        Raises:
            OSError: the file cannot be written.
            Unavailable: likewise.
            LeaseLost: another gateway runs the batches.
        """
        ...

    def discard(self, file_id: str, lease: int) -> None:
        """Delete a file of results that has no lines."""
        ...

    def delete(self, tenant: str, file_id: str, now: float) -> None:
        """Delete a file.

        Raises:
            NoSuchFile: the tenant has no such file.
            WrongState: a batch that is not over reads the file.
        """
        ...

    def try_lock(self) -> int:
        """Try to become the process that runs batches, or to remain it.

        Returns:
            Number of the lease, which is another one if a different process may have run batches meanwhile; 0 if this
            process is not the one.
        """
        ...

    def sweep(self, now: float) -> None:
        """Delete expired files, and what cut uploads left.

        Args:
            now: Unix time in seconds.
        """
        ...

    def close(self) -> None:
        """Give the lock back, and end the threads."""
        ...
