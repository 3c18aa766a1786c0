"""One object in one file: written under another name and then renamed, read straight into the caller's buffers.

    0      frame header, zeros to 4096       so that pages begin where direct I/O can read them
    4096   the pages, zeros to a multiple of 4096

Direct I/O bypasses the page cache. It needs memory, offsets and lengths in multiples of 4096; buffers that are not
aligned are read through one that is. The temporary file is locked while its writer lives, by `flock`, which the kernel
gives up with the process: whoever gets the lock knows that the writer is dead and the file is litter.
"""

import ctypes
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from kvferry.core.clock import Clock
from kvferry.kv.tiers.frame import CHUNK_BYTES, HEADER_BYTES, FrameDamaged, Opening, chunked
from kvferry.kv.tiers.tier import TierError

ALIGNMENT = 4096
TEMPORARY = ".part-"
"""How temporary files begin."""
DIRECT = getattr(os, "O_DIRECT", 0)
_DIRECT_CHUNK_BYTES = 1 << 20
_MAX_BUFFERS = 512


def file_bytes(object_bytes: int) -> int:
    """Length of an object's file."""
    return ALIGNMENT + aligned(object_bytes)


def aligned(num_bytes: int) -> int:
    """Rounded up to what direct I/O can move."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def aligned_buffer(num_bytes: int) -> memoryview:
    """Zeroed memory that direct I/O can use; lives as long as the view."""
    return memoryview(mmap.mmap(-1, aligned(num_bytes)))


class Reading:
    """The open file of one object; close it. Evicting it meanwhile does no harm: the open file stays."""

    def __init__(self, path: Path, *, direct: bool) -> None:
        """
        Raises:
            OSError: it cannot be opened; `FileNotFoundError` when it is not there.
        """
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a named pipe must not make us wait
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
        """Read and verify.

        Args:
            into: where the pages go; flat, together `object_bytes` long.
            bounce: an aligned buffer of at least `aligned(object_bytes)` bytes, for direct reads into buffers that are
                not aligned.

        Raises:
            FrameDamaged: the file is not what was stored.
            TierError: the deadline passed between two chunks.
            OSError: it cannot be read.
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
                raise TierError("too slow: the deadline passed during the read")
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
        """Say that it was used at `wall`, for whoever scans the folder next. Best effort."""
        with suppress(OSError):
            os.utime(self._fd, (wall, wall))

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _fill(self, views: list[memoryview], offset: int) -> int:
        """Fill the views from `offset`; their length."""
        total = sum(len(v) for v in views)
        done = 0
        while done < total:
            count = os.preadv(self._fd, _from(views, done)[:_MAX_BUFFERS], offset + done)
            if count == 0:
                raise FrameDamaged("the file ends too soon")
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
    """Write an object's file; it appears whole, or not at all.

    Raises:
        TierError: the deadline passed between two chunks; nothing is left.
        OSError: it could not be written; nothing is left.
    """
    temporary = folder / f"{TEMPORARY}{name[:16]}-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (DIRECT if direct else 0)
    fd = os.open(temporary, flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        start = memoryview(header.ljust(ALIGNMENT, b"\0"))
        end = memoryview(bytes(aligned(object_bytes) - object_bytes))
        views = [v for v in (start, *pages, end) if len(v)]
        if direct:
            views = _as_aligned(views)
        offset = 0
        for run in chunked(views, _DIRECT_CHUNK_BYTES):
            if clock.monotonic() > deadline:
                raise TierError("too slow: the deadline passed during the write")
            offset += _put(fd, run, offset)
        if os.fstat(fd).st_size != file_bytes(object_bytes):
            raise OSError(0, "the file did not get its full length")
        if sync:
            os.fsync(fd)
        temporary.rename(folder / name)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(fd)


def sweep(temporary: Path) -> bool:
    """Remove a temporary file if its writer is dead; whether it was."""
    try:
        fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.unlink()
    except OSError:
        return False  # somebody writes it, or another one sweeps
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
    """What is left of the views after `done` bytes."""
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
    """One aligned copy of all views."""
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
