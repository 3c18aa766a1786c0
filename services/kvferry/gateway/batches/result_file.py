"""An output file or error file of a batch that is not over: whole lines, appended and synced.

Methods block. One thread at a time appends; `ResultWriter` collects the lines of tasks.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from kvferry.core.errors import Unavailable
from kvferry.gateway.batches.lines import done_id
from kvferry.gateway.batches.storage import ResultLines

_log = logging.getLogger(__name__)


class ResultFile:
    """A file of lines that a process may continue after another one was killed."""

    def __init__(self, path: Path) -> None:
        """Open or create a file, and cut off a line that is not whole.

        Args:
            path: the file.

        Raises:
            OSError: the file cannot be written.
        """
        self.done: set[str] = set()
        """Custom ids of the lines."""
        self.size = 0
        """Size of the whole lines in bytes."""
        self.count = 0
        self._lock = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600)
        try:
            self._repair(path)
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, lines: bytes) -> None:
        """Append whole lines and sync them; on an error the file is as before.

        Raises:
            OSError: the lines could not be written.
        """
        with self._lock:
            try:
                rest = memoryview(lines)
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
                os.fsync(self._descriptor)
            except OSError:
                self._cut()
                raise
            self.size += len(lines)
            self.count += lines.count(b"\n")

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _repair(self, path: Path) -> None:
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            for line in file:
                name = done_id(line)
                if name is None:
                    _log.warning("%s has a line that is not whole at byte %d; it is computed again", path, self.size)
                    break
                self.done.add(name)
                self.size += len(line)
                self.count += 1
        self._cut()

    def _cut(self) -> None:
        os.ftruncate(self._descriptor, self.size)
        os.lseek(self._descriptor, self.size, os.SEEK_SET)


class ResultWriter:
    """Appends the lines of several tasks: those that arrive during a sync are written together."""

    def __init__(self, file: ResultLines, run: Callable[..., Coroutine[Any, Any, None]]) -> None:
        """
        Args:
            file: the file.
            run: calls a function with arguments on a thread.
        """
        self.file, self._run = file, run
        self._lines: list[bytes] = []
        self._turn = asyncio.Lock()
        self._writing: asyncio.Future[None] | None = None

    async def add(self, line: bytes) -> None:
        """Append a line; return when it is kept.

        Raises:
            OSError: the line could not be written, and may be added again.
            Unavailable: likewise.
        """
        self._lines.append(line)
        async with self._turn:
            if not any(each is line for each in self._lines):
                return  # written together with an earlier line
            taken, self._lines = self._lines, []
            self._writing = asyncio.ensure_future(self._run(self.file.append, b"".join(taken)))
            try:
                await asyncio.shield(self._writing)
            except (OSError, Unavailable):
                self._lines = [each for each in taken if each is not line] + self._lines
                raise

    async def close(self) -> None:
        """Close the file, after a line that is being written; drop the lines that wait."""
        self._lines.clear()
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        await self._run(self.file.close)
