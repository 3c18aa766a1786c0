"""Opens the files of a model: regular files only, since a named pipe or a device would block or never end."""

import mmap
import os
import stat
from io import BufferedReader
from pathlib import Path

from kvferry.core.errors import ModelFileError

MAX_JSON_BYTES = 64 << 20
"""Maximum size of a model's JSON file."""


def read_file(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Read a whole file.

    Raises:
        ModelFileError: the file is missing, not a regular file, or larger than `max_bytes`.
    """
    try:
        with _open(path) as handle:
            content = handle.read(max_bytes + 1)
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {_reason(error)}") from error
    if len(content) > max_bytes:
        raise ModelFileError(f"{path} is larger than {max_bytes} bytes; it is not a model's JSON file")
    return content


def is_present(path: Path) -> bool:
    """Return whether an optional file exists.

    Raises:
        ModelFileError: there is something else under this name, such as a link without a target, or the folder cannot
            be searched.
    """
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            return True
    except (FileNotFoundError, NotADirectoryError):
        if not path.is_symlink():
            return False
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {_reason(error)}") from error
    except ValueError:  # a name that no file can have
        return False
    raise ModelFileError(f"{path} is not a regular file or a link to one; restore the file, or remove the entry")


def map_file(path: Path) -> mmap.mmap:
    """Map a file into memory for reading.

    Raises:
        ModelFileError: the file is missing, empty or not a regular file.
    """
    try:
        with _open(path) as handle:
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelFileError(f"cannot open {path}: {_reason(error)}") from error


def copy_file(path: Path, max_bytes: int) -> mmap.mmap:
    """Read a whole file into memory of this process, which the file's later changes do not reach. A mapped file that is
    truncated while it is read would end the process.

    Raises:
        ModelFileError: the file is missing, empty, not a regular file, larger than `max_bytes`, or was truncated.
    """
    try:
        with _open(path) as handle:
            size = os.fstat(handle.fileno()).st_size
            if size > max_bytes:
                raise ModelFileError(f"{path} has {size} bytes; at most {max_bytes} are accepted")
            copy = mmap.mmap(-1, size)
            if handle.readinto(copy) != size:
                raise ModelFileError(f"{path} was truncated while it was read; save it again")
            return copy
    except (OSError, ValueError) as error:
        raise ModelFileError(f"cannot open {path}: {_reason(error)}") from error


def _open(path: Path) -> BufferedReader:
    """Open a regular file. Does not block, as opening a named pipe without a writer would."""
    handle = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
        handle.close()
        raise OSError(f"{path.name} is not a regular file")
    return handle


def _reason(error: Exception) -> str:
    """Return what went wrong, without number and path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
