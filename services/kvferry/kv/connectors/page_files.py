"""Memory for pages: private, or in a memory file if other processes of the worker compute with the pages."""

import mmap

from kvferry.core.process.memory_file import MemoryFile, MemoryPlace
from kvferry.kv.interface.connector import TransportSetup


class OwnMemory:
    """Writable memory of a transport, aligned to a page of the system, zeros at first."""

    def __init__(self, num_bytes: int, setup: TransportSetup) -> None:
        """
        Args:
            num_bytes: size of the memory.
            setup: configuration of the transport.
        """
        self._file = MemoryFile("kvferry-pages", num_bytes) if setup.has_ranks else None
        self.memory: memoryview = memoryview(mmap.mmap(-1, num_bytes)) if self._file is None else self._file.memory

    @property
    def place(self) -> MemoryPlace | None:
        """Where other processes of the worker find the memory; `None` if it is private."""
        return None if self._file is None else self._file.place
