"""Whether a folder's disk is read faster past the page cache: measured at start, on a file of its own.

Reads through the page cache are asked for cold, since what is warm there is a happy accident of free memory, and the
tier above keeps what is hot. Past it is chosen only where it is clearly faster; it also leaves the memory to others.
"""

import fcntl
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvferry.core.clock import Clock
from kvferry.kv.tiers.disk_file import DIRECT, TEMPORARY, aligned, aligned_buffer

_PROBE_BYTES = 16 << 20
_MAX_CHUNK = 4 << 20
_ROUNDS = 3
_CLEARLY = 1.25


def direct_is_better(folder: Path, clock: Clock, *, must: bool, object_bytes: int) -> bool:
    """Whether to read past the page cache; `must`: whether that is possible at all.

    Raises:
        OSError: no file can be made here.
    """
    path = folder / f"{TEMPORARY}probe-{secrets.token_hex(8)}"
    chunk = min(_MAX_CHUNK, aligned(object_bytes))
    count = max(1, (chunk if must else _PROBE_BYTES) // chunk)
    buffer = aligned_buffer(chunk)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # else a worker that starts beside us would sweep it
            for i in range(count):
                os.pwrite(fd, buffer, i * chunk)
            os.fsync(fd)
            direct = _open_past_the_cache(path)
        except OSError:
            return False
        try:
            past = min(_seconds(direct, buffer, count, clock, lambda: None) for _ in range(_ROUNDS))
        except OSError:
            return False
        finally:
            os.close(direct)
        if must:
            return bool(DIRECT)
        through = min(_seconds(fd, buffer, count, clock, lambda: _drop_cache(fd)) for _ in range(_ROUNDS))
        return bool(DIRECT) and past * _CLEARLY < through
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


def _open_past_the_cache(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | DIRECT)


def _drop_cache(fd: int) -> None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
