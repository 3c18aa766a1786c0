"""Errors of files and batches."""

from kvferry.core.errors import InvalidRequest

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
