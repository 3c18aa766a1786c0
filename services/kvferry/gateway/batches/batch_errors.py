"""Errors of files and batches."""

from kvferry.core.errors import InvalidRequest, KvferryError, Overloaded, shortened

FOLDER_SETTING = "batch_folder"
"""Name of the setting, for error messages."""


class NoSuchFile(InvalidRequest):
    """The tenant has no file with this id: it was never stored, was deleted, or has expired."""

    http_status = 404
    reason = "FILE_NOT_FOUND"


class NoSuchBatch(InvalidRequest):
    """The tenant has no batch with this id."""

    http_status = 404
    reason = "BATCH_NOT_FOUND"


class WrongState(InvalidRequest):
    """The state of the object does not allow the operation."""

    http_status = 409
    reason = "WRONG_STATE"


class LeaseLost(KvferryError):
    """Another gateway runs the batches, or results were lost: what a run knows of its batch is not true any more."""

    reason = "BATCH_LEASE_LOST"


class ResultsLost(KvferryError):
    """The storage has lost results of a run, whose lines are computed again."""

    reason = "BATCH_RESULTS_LOST"


def no_file(file_id: str, field: str) -> NoSuchFile:
    """Return the error for a file that the tenant does not have."""
    return NoSuchFile(f"file {shortened(file_id)!r} does not exist; GET /v1/files lists the files", field=field)


def no_place(after: str, what: str) -> NoSuchFile | NoSuchBatch:
    """Return the error for a list that begins after an unknown object.

    Args:
        after: the given id.
        what: `file` or `batch`.
    """
    kind = NoSuchFile if what == "file" else NoSuchBatch
    return kind(f"after is {shortened(after)!r}, which is not the id of a {what}", field="after")


def no_batch(batch_id: str) -> NoSuchBatch:
    """Return the error for a batch that the tenant does not have."""
    return NoSuchBatch(
        f"batch {shortened(batch_id)!r} does not exist; GET /v1/batches lists the batches", field="batch_id"
    )


def is_input(file_id: str, batch_id: str) -> WrongState:
    """Return the error for a file that is the input of a batch which is not over."""
    return WrongState(
        f"file {file_id!r} is the input of batch {batch_id!r}, which is not over; cancel the batch first",
        field="file_id",
    )


def too_many_open(num_open: int, most: int) -> Overloaded:
    """Return the error for a further batch of a tenant that has too many."""
    return Overloaded(
        f"{num_open} batches are not over, and at most {most} are allowed; wait for one of them, or cancel it",
        reason="TOO_MANY_BATCHES",
    )


def check_file_room(count: int, stored: int, num_bytes: int, *, max_files: int, max_bytes: int) -> None:
    """Check that a tenant may store a further file.

    Args:
        count: number of its files.
        stored: their size in bytes.
        num_bytes: size of the further file.
        max_files: maximum number of the tenant's files.
        max_bytes: maximum size of the tenant's files together.

    Raises:
        Overloaded: it has too many files, or too large ones.
    """
    if count >= max_files:
        raise Overloaded(
            f"{count} files are stored, and at most {max_files} are allowed (setting tenant_files); delete files",
            reason="TOO_MANY_FILES",
            field="file",
        )
    if stored + num_bytes > max_bytes:
        raise Overloaded(
            f"the stored files have {stored} bytes; a file of {num_bytes} bytes exceeds the limit of {max_bytes} "
            "bytes (setting tenant_file_bytes); delete files",
            reason="FILES_TOO_LARGE",
            field="file",
        )
