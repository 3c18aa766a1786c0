"""Object files of the disk tier: written to a temporary file and then renamed; read directly into the caller's buffers.

    0      frame header, zeros to 4096       the pages are aligned for direct I/O
    4096   the pages, zeros to a multiple of 4096

Direct I/O bypasses the page cache. It needs addresses, offsets and lengths in multiples of 4096; unaligned buffers are
read through an aligned bounce buffer. The writer holds an `flock` on its temporary file, which the kernel releases when
the process exits: a process that acquires the lock may delete the file, since its writer no longer runs.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from kvferry.core.clock import Clock
from kvferry.kv.tiers.interface.frame import CHUNK_BYTES, HEADER_BYTES, FrameDamaged, Opening, chunked
from kvferry.kv.tiers.interface.tier import TierError

ALIGNMENT = 4096
TEMPORARY = ".part-"
"""Prefix of the names of temporary files."""
DIRECT = getattr(os, "O_DIRECT", 0)
_DIRECT_CHUNK_BYTES = 1 << 20
_MAX_BUFFERS = 512
_MAX_SWEPT = 8
"""Maximum number of temporary files that scans may remove before this worker locks one."""


def file_bytes(object_bytes: int) -> int:
    """Return the length of an object's file in bytes."""
    return ALIGNMENT + aligned(object_bytes)


def aligned(num_bytes: int) -> int:
    """Round `num_bytes` up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def aligned_buffer(num_bytes: int) -> memoryview:
    """Allocate zeroed memory that is aligned for direct I/O; it is freed with the view."""
    return memoryview(mmap.mmap(-1, aligned(num_bytes)))


class Reading:
    """An object's file, open for reading; the caller must close it. Eviction during the read is harmless."""

    def __init__(self, path: Path, *, direct: bool) -> None:
        """
        Args:
            path: path of the file.
            direct: whether to bypass the page cache (O_DIRECT).

        Raises:
            OSError: the file cannot be opened; `FileNotFoundError` if it does not exist.
        """
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a named pipe must not block
        self._fd = os.open(path, flags | (DIRECT if direct else 0))
        self._is_direct = direct

    def read(
        self,
        into: Sequence[memoryview],
        object_bytes: int,
        opener: Callable[[bytes], Opening],
        deadline: float,
        clock: Clock,
        bounce: memoryview | None = None,
    ) -> None:
        """Read and verify the object.

        Args:
            into: target buffers of the pages; byte views, `object_bytes` long in total.
            object_bytes: length of the object.
            opener: verifies the header and returns the verifier of the pages.
            deadline: time in seconds, checked between chunks.
            clock: clock of the deadline.
            bounce: aligned buffer of at least `aligned(object_bytes)` bytes, for direct reads into unaligned
                buffers.

        Raises:
            FrameDamaged: the file differs from the stored object.
            TierError: the deadline passed between two chunks.
            OSError: the file cannot be read.
        """
        length = os.fstat(self._fd).st_size
        if length != file_bytes(object_bytes):
            raise FrameDamaged(f"the file has {length} bytes, not {file_bytes(object_bytes)}")
        head = aligned_buffer(ALIGNMENT) if self._is_direct else memoryview(bytearray(ALIGNMENT))
        self._fill([head], 0)
        if any(head[HEADER_BYTES:]):
            raise FrameDamaged("the file's header was altered")
        opening = opener(bytes(head[:HEADER_BYTES]))
        views, through = list(into), None
        if self._is_direct and not all(_is_aligned(v) for v in views):
            assert bounce is not None
            through = bounce
            views = [bounce[: aligned(object_bytes)]]
        padding = memoryview(bytearray(aligned(object_bytes) - object_bytes)) if through is None else memoryview(b"")
        offset, left = ALIGNMENT, object_bytes
        size = _DIRECT_CHUNK_BYTES if self._is_direct else CHUNK_BYTES
        for run in chunked([*views, padding] if len(padding) else views, size):
            if clock.monotonic() > deadline:
                raise TierError("the deadline passed during the read")
            offset += self._fill(run, offset)
            for piece in run if through is None else ():
                opening.feed(piece[:left])
                left -= min(left, len(piece))
        if through is not None:
            _copy_and_feed(through[:object_bytes], into, opening)
            padding = through[object_bytes : aligned(object_bytes)]
        if any(padding):
            raise FrameDamaged("the file's end was altered")
        opening.finish()

    def touch(self, wall: float) -> None:
        """Set the modification time to `wall`, the time of use, for later scans. Best effort."""
        with suppress(OSError):
            os.utime(self._fd, (wall, wall))

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _fill(self, views: list[memoryview], offset: int) -> int:
        """Read from file position `offset` until the views are full; return their total length."""
        total = sum(len(v) for v in views)
        done = 0
        while done < total:
            count = os.preadv(self._fd, _from(views, done)[:_MAX_BUFFERS], offset + done)
            if count == 0:
                raise FrameDamaged("the file is truncated")
            done += count
        return total


def write_object(
    folder: Path,
    name: str,
    header: bytes,
    pages: Sequence[memoryview],
    object_bytes: int,
    *,
    direct: bool,
    sync: bool,
    deadline: float,
    clock: Clock,
) -> None:
    """Write an object's file, which appears atomically.

    Args:
        folder: folder of the tier.
        name: name of the file.
        header: header of the object, at most `ALIGNMENT` bytes.
        pages: byte views of the pages, `object_bytes` long in total.
        object_bytes: length of the object.
        direct: whether to bypass the page cache.
        sync: whether to flush the file to the device before it appears.
        deadline: time in seconds, checked between chunks.
        clock: clock of the deadline.

    Raises:
        TierError: the deadline passed between two chunks; no file remains.
        OSError: the file could not be written; no file remains.
    """
    temporary, fd = _locked_temporary(folder, name, direct)
    try:
        start = memoryview(header.ljust(ALIGNMENT, b"\0"))
        end = memoryview(bytes(aligned(object_bytes) - object_bytes))
        views = [v for v in (start, *pages, end) if len(v)]
        if direct:
            views = _as_aligned(views)
        offset = 0
        for run in chunked(views, _DIRECT_CHUNK_BYTES):
            if clock.monotonic() > deadline:
                raise TierError("the deadline passed during the write")
            offset += _put(fd, run, offset)
        if os.fstat(fd).st_size != file_bytes(object_bytes):
            raise OSError(0, "the file is shorter than the data written to it")
        if sync:
            os.fsync(fd)
        temporary.rename(folder / name)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(fd)


def _locked_temporary(folder: Path, name: str, direct: bool) -> tuple[Path, int]:
    """Create a temporary file and lock it. A `sweep` between the two steps removes the file; a new one is then created.

    Raises:
        OSError: the file could not be created or locked; no file remains.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (DIRECT if direct else 0)
    for _ in range(_MAX_SWEPT):
        temporary = folder / f"{TEMPORARY}{name[:16]}-{secrets.token_hex(8)}"
        fd = os.open(temporary, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return temporary, fd
        except BlockingIOError:
            pass  # a sweep holds the lock and removes the file
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                temporary.unlink()
            raise
        os.close(fd)
    raise OSError(errno.EAGAIN, "temporary files were repeatedly removed by another worker's scan")


def sweep(temporary: Path) -> bool:
    """Remove a temporary file if its writer no longer runs; return whether it was removed."""
    try:
        fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.unlink()
    except OSError:
        return False  # the file is being written, or a different process is removing it
    else:
        return True
    finally:
        os.close(fd)


def _put(fd: int, views: list[memoryview], offset: int) -> int:
    total = sum(len(v) for v in views)
    done = 0
    while done < total:
        done += os.pwritev(fd, _from(views, done)[:_MAX_BUFFERS], offset + done)
    return total


def _from(views: list[memoryview], done: int) -> list[memoryview]:
    """Return the part of the views after the first `done` bytes."""
    for i, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[i + 1 :]]
        done -= len(view)
    return []


def _is_aligned(view: memoryview) -> bool:
    return not view.readonly and len(view) % ALIGNMENT == 0 and _address(view) % ALIGNMENT == 0


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _as_aligned(views: Sequence[memoryview]) -> list[memoryview]:
    """Copy all views into one aligned buffer."""
    whole = aligned_buffer(sum(len(v) for v in views))
    at = 0
    for view in views:
        whole[at : at + len(view)] = view
        at += len(view)
    return [whole]


def _copy_and_feed(source: memoryview, into: Sequence[memoryview], opening: Opening) -> None:
    at = 0
    for run in chunked(into, CHUNK_BYTES):
        for piece in run:
            piece[:] = source[at : at + len(piece)]
            opening.feed(piece)
            at += len(piece)
