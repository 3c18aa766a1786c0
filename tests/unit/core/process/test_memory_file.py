"""Memory files: shared between processes by process and descriptor, and freed with their last user."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from kvferry.core.process.memory_file import MemoryFile, open_memory

WRITE = """
import sys
from kvferry.core.process.memory_file import MemoryPlace, open_memory
memory = open_memory(MemoryPlace(*map(int, sys.argv[1:])))
memory[:5] = bytes(reversed(memory[:5]))
"""


def test_another_process_reads_and_writes_the_memory() -> None:
    file = MemoryFile("test", 1 << 20)
    assert bytes(file.memory[:5]) == bytes(5)
    file.memory[:5] = b"ferry"
    place = file.place
    numbers = map(str, (place.pid, place.descriptor, place.inode, place.num_bytes))
    subprocess.run([sys.executable, "-c", WRITE, *numbers], check=True, timeout=60)
    assert bytes(file.memory[:5]) == b"yrref"


def test_memory_stays_while_it_is_mapped_and_the_descriptor_is_closed() -> None:
    file = MemoryFile("test", 4096)
    memory, place = file.memory, file.place
    other = open_memory(place)
    del file
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(place.descriptor)
    memory[0] = 7
    assert other[0] == 7


def test_another_file_under_the_same_descriptor_is_refused() -> None:
    file = MemoryFile("test", 4096)
    with pytest.raises(FileNotFoundError, match="has closed the memory file"):
        open_memory(replace(file.place, inode=file.place.inode + 1))
    with pytest.raises(FileNotFoundError, match="has closed the memory file"):
        open_memory(replace(file.place, num_bytes=8192))
