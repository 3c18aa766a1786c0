"""Disk probe: measures at start, with a temporary file, whether direct I/O reads faster than buffered I/O.

Buffered reads are measured with a cold page cache, since the DRAM tier already holds frequently used objects. Direct
I/O is chosen only if it is clearly faster; direct I/O also leaves the page cache to other processes.
"""

import fcntl
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvferry.core.clock import Clock
from kvferry.kv.tiers.disk.object_file import DIRECT, TEMPORARY, aligned, aligned_buffer

_PROBE_BYTES = 16 << 20
_MAX_CHUNK = 4 << 20
_ROUNDS = 3
_CLEARLY = 1.25


def direct_is_better(folder: Path, clock: Clock, *, must: bool, object_bytes: int) -> bool:
    """Return whether to use direct I/O in a folder.

    Args:
        folder: folder in which a temporary file is written.
        clock: clock of the measurement.
        must: whether to skip the measurement and to return whether direct I/O is possible.
        object_bytes: bytes per object, from which the size of one access follows.

    Raises:
        OSError: files cannot be created in `folder`.
    """
    path = folder / f"{TEMPORARY}probe-{secrets.token_hex(8)}"
    chunk = min(_MAX_CHUNK, aligned(object_bytes))
    count = max(1, (chunk if must else _PROBE_BYTES) // chunk)
    buffer = aligned_buffer(chunk)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            # A worker that is starting now does not remove a locked file.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for i in range(count):
                os.pwrite(fd, buffer, i * chunk)
            os.fsync(fd)
            direct = _open_direct(path)
        except OSError:
            return False
        try:
            direct_seconds = min(_seconds(direct, buffer, count, clock, lambda: None) for _ in range(_ROUNDS))
        except OSError:
            return False
        finally:
            os.close(direct)
        if must:
            return bool(DIRECT)
        buffered_seconds = min(_seconds(fd, buffer, count, clock, lambda: _drop_cache(fd)) for _ in range(_ROUNDS))
        return bool(DIRECT) and direct_seconds * _CLEARLY < buffered_seconds
    finally:
        os.close(fd)
        with suppress(OSError):
            path.unlink()


def _seconds(fd: int, buffer: memoryview, count: int, clock: Clock, before: Callable[[], None]) -> float:
    before()
    started = clock.monotonic()
    for i in range(count):
        os.preadv(fd, [buffer], i * len(buffer))
    return clock.monotonic() - started


def _open_direct(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | DIRECT)


def _drop_cache(fd: int) -> None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
