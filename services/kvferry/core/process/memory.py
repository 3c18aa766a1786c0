"""Memory allocator settings of a process that handles large buffers now and then."""

import ctypes
import sys

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
