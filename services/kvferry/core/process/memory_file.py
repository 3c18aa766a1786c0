"""Memory that several processes of one user share: an anonymous file, which one of them creates and the others open by
process and descriptor. The kernel frees it when the last process that maps it exits."""

import mmap
import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """Where another process finds a memory file."""

    pid: int
    """The process that created the file, or another one that has it open."""
    descriptor: int
    inode: int
    num_bytes: int


class MemoryFile:
    """Writable memory in an anonymous file. Pages that are never written take no physical memory."""

    def __init__(self, name: str, num_bytes: int) -> None:
        """
        Args:
            name: name for diagnostics, as in /proc/<pid>/maps.
            num_bytes: size, at least 1.
        """
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, num_bytes)
            self.memory = memoryview(mmap.mmap(descriptor, num_bytes))
            """The whole file."""
            self.place = MemoryPlace(os.getpid(), descriptor, os.fstat(descriptor).st_ino, num_bytes)
            """For other processes, while this object exists."""
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def __del__(self) -> None:
        """Close the file; memory that is mapped or referenced stays."""
        descriptor = getattr(self, "_descriptor", -1)
        if descriptor >= 0:
            os.close(descriptor)


def open_memory(place: MemoryPlace) -> memoryview:
    """Map a memory file of another process of this user, writable.

    Args:
        place: `MemoryFile.place`.

    Raises:
        OSError: the process has exited or closed the file, or the kernel refuses access to it.
    """
    descriptor = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if (found.st_ino, found.st_size) != (place.inode, place.num_bytes):
            raise FileNotFoundError(f"process {place.pid} has closed the memory file with inode {place.inode}")
        return memoryview(mmap.mmap(descriptor, place.num_bytes))
    finally:
        os.close(descriptor)
