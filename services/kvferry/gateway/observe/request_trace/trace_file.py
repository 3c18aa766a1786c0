"""Writes a request trace to a file of bounded size on a separate thread.

event loop -- add --> queue (bounded; drops when full) --> thread: names, line --> FILE, rotated to FILE.old
"""

import fcntl
import logging
import os
import secrets
import stat
import threading
from collections import deque
from io import BufferedWriter
from pathlib import Path

from kvferry.core.errors import UsageError
from kvferry.core.hashing import BlockNamers
from kvferry.core.process.exit_threads import start_thread
from kvferry.gateway.observe.request_trace.trace_line import TracedSample, trace_line

MIN_BYTES = 1 << 16
_MAX_QUEUED_TOKENS = 1 << 23
_MAX_QUEUED = 4096
_JOIN_SECONDS = 5.0
_log = logging.getLogger(__name__)


class TraceFile:
    """A request trace. The two files `path` and `path.old` together have at most `max_bytes`.

    `add` is called on one thread; `close` ends the trace.
    """

    def __init__(self, path: Path, max_bytes: int, key: bytes) -> None:
        """
        Args:
            path: the file; an existing one is continued.
            max_bytes: bound of both files together, at least `MIN_BYTES`.
            key: secret for the block ids; if it is empty, a random secret is used, which is stored nowhere.

        Raises:
            UsageError: the file cannot be written, another process is writing it, or the bound is too small.
        """
        if max_bytes < MIN_BYTES:
            raise UsageError(
                f"trace_file_bytes must be at least {MIN_BYTES} for each gateway process, not {max_bytes}",
                field="trace_file_bytes",
            )
        self._path, self._most = path, max_bytes // 2
        self._namers = BlockNamers(key or secrets.token_bytes(32))
        self._file, self._size = self._open()
        self._samples: deque[TracedSample] = deque()
        self._queued_tokens = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self.num_dropped = 0
        """Samples that are not in the trace: the queue was full, a line was too long, or writing failed."""
        self._thread = start_thread(self._write_all, "request trace", stop=self._end)

    def add(self, sample: TracedSample) -> None:
        """Queue a sample; it is dropped if too much is queued."""
        with self._changed:
            is_full = len(self._samples) >= _MAX_QUEUED or self._queued_tokens >= _MAX_QUEUED_TOKENS
            if is_full or self._is_closed:
                self.num_dropped += 1
                return
            self._samples.append(sample)
            self._queued_tokens += sample.num_tokens
            self._changed.notify()

    def close(self) -> None:
        """Write the queued samples and close the file. Blocks for at most a few seconds. Idempotent."""
        self._end()
        self._thread.join(_JOIN_SECONDS)
        if self.num_dropped:
            _log.warning("%d samples are not in the request trace %s", self.num_dropped, self._path)

    def _end(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _write_all(self) -> None:
        failed = False
        while True:
            with self._changed:
                while not self._samples and not self._is_closed:
                    self._changed.wait()
                if not self._samples:
                    break
                sample = self._samples.popleft()
                self._queued_tokens -= sample.num_tokens
                is_last = not self._samples
            try:
                if self._file.closed:  # a rotation failed
                    self._file, self._size = self._open()
                self._write(trace_line(sample, self._namers).encode(), is_last=is_last)
            except (OSError, UsageError) as error:
                self.num_dropped += 1
                if not failed:
                    _log.error("the request trace %s cannot be written: %s", self._path, error)
                failed = True
        try:
            self._file.close()
        except OSError as error:
            _log.error("the request trace %s cannot be written: %s", self._path, error)

    def _write(self, line: bytes, *, is_last: bool) -> None:
        if len(line) > self._most:
            self.num_dropped += 1
            return
        if self._size + len(line) > self._most:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".old"))
            self._file, self._size = self._open()
        self._file.write(line)
        self._size += len(line)
        if is_last:
            self._file.flush()

    def _open(self) -> tuple[BufferedWriter, int]:
        """Open the file for appending, readable by this user only, and return it with its size."""
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                f"trace_file {str(self._path)!r} cannot be written: {error.strerror}; use a file in a folder that "
                "exists and is writable",
                field="trace_file",
            ) from error
        file = os.fdopen(descriptor, "ab")
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            file.close()
            raise UsageError(
                f"trace_file {str(self._path)!r} is not a regular file; use a regular file", field="trace_file"
            )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise UsageError(
                f"trace_file {str(self._path)!r} is being written by another process; use another file",
                field="trace_file",
            ) from error
        os.fchmod(descriptor, 0o600)  # also if the file already existed
        return file, found.st_size
