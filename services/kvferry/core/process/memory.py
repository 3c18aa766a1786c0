"""Memory of this process: its limit, and the return of freed memory to the system."""

import ctypes
import functools
import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_BYTES = 256 << 10
_TRIM_BYTES = 8 << 20


def return_freed_memory() -> None:
    """Have the allocator return freed memory to the system.

    By default glibc raises its threshold for separate mappings to the largest buffer that was freed, up to 32 MiB;
    later large buffers then fragment the heap, which keeps its largest size. No effect on other C libraries.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
            mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)


def resident_memory() -> int:
    """Return the bytes of this process that are in physical memory; 0 where the system does not report them."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class _AllocatorState(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


@functools.cache
def _allocator_state() -> Callable[[], _AllocatorState] | None:
    found = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if found is not None:
        found.restype = _AllocatorState
    return found


def allocated_bytes() -> int:
    """Return the bytes that all threads have allocated with `malloc` and not freed; 0 where the C library does not
    report them. Objects of Python are mostly not among them; those of native libraries are."""
    state = _allocator_state()
    if state is None:
        return 0
    found = state()
    return int(found.uordblks) + int(found.hblkhd)


def free_memory() -> None:
    """Collect garbage, and return free memory to the system: about 10 ms per 100 MiB.

    A large request leaves objects that refer to each other, which Python frees only in a collection, and free memory
    between other allocations, which glibc returns only on request.
    """
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


_MAX_WAIT = 60
"""Maximum number of checks between two returns of an idle process that has not grown."""


@dataclass(slots=True)
class MemoryGrowth:
    """Decides when a process should return freed memory, from its resident memory in bytes at regular checks.

    Growth is measured from the memory that remained after the last return. If requests ran during that return, their
    memory was part of it, so in an idle process growth is measured from the last return without requests. A request
    may also have been received or answered during that one. An idle process that is larger than it has been before
    therefore repeats the return, after 1, 2, 4, and then up to 60 checks; otherwise memory that such requests have
    freed since would be kept.
    """

    idle_limit: int
    """Growth in bytes after which an idle process returns memory."""
    busy_limit: int
    """Growth in bytes after which a process returns memory during requests, which wait meanwhile."""
    idle_base: int
    busy_base: int
    _lowest: int = field(init=False)
    _wait: int = 1
    """Number of checks from the next return of an idle process to the one after it."""
    _left: int = 0
    """Number of checks until an idle process repeats the return."""

    def __post_init__(self) -> None:
        self._lowest = self.idle_base

    def is_due(self, resident: int, *, busy: bool) -> bool:
        """Return whether memory should be returned now; called once per check.

        Args:
            resident: resident memory of the process in bytes.
            busy: whether requests are running.
        """
        self.idle_base, self.busy_base = min(self.idle_base, resident), min(self.busy_base, resident)
        self._lowest = min(self._lowest, resident)
        if busy:
            self._wait = 1
            return resident > self.busy_base + self.busy_limit
        self._left -= 1
        is_larger = resident > self._lowest + self.idle_limit
        return resident > self.idle_base + self.idle_limit or (is_larger and self._left <= 0)

    def returned(self, resident: int, *, busy: bool) -> None:
        """Record the memory that remains after a return.

        Args:
            resident: resident memory after the return, in bytes.
            busy: whether requests were running.
        """
        self.busy_base = resident
        if not busy:
            self.idle_base = resident
            self._left, self._wait = self._wait, min(2 * self._wait, _MAX_WAIT)


def usable_memory(cgroup: Path = _CGROUP) -> int:
    """Return the memory limit of this process in bytes: the machine's memory, or its cgroup's limit if that is lower.

    Args:
        cgroup: mount point of cgroup v1 or v2.
    """
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in (cgroup / "memory.max", cgroup / "memory" / "memory.limit_in_bytes"):
        try:
            return min(installed, int(file.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return installed
