"""Contents of files in Redis: uploads and results that are written in chunks, and their reader.

A chunk is sealed for its file and its number, so that a client that can write to Redis cannot move it.
"""

import io
import threading
from collections.abc import Iterable, Iterator, Sequence

from kvferry.core.errors import Unavailable
from kvferry.gateway.batches.batch_errors import NoSuchFile, ResultsLost
from kvferry.gateway.batches.lines import done_id
from kvferry.gateway.batches.records import FileRecord
from kvferry.gateway.batches.shared import shared_scripts as scripts
from kvferry.gateway.batches.shared.shared_calls import SharedCalls
from kvferry.gateway.batches.shared.shared_scripts import ScriptReply

CHUNK_BYTES = 256 << 10
"""Size of the chunks of an upload before they are sealed, except for the last one."""
UPLOAD_SECONDS = 900.0
"""Time since its last chunk after which an upload is deleted."""
_GROUP_BYTES = 1 << 20
"""Size of the result lines that are appended with one call, unless one line alone is larger."""


class SharedUpload:
    """A file that is being received; see `UploadWriter`."""

    def __init__(self, calls: SharedCalls, file_id: str) -> None:
        self.file_id, self.num_bytes = file_id, 0
        self._calls, self._name = calls, calls.seal.file(file_id)
        self._writer = _ChunkWriter(calls, file_id)
        self._rest = bytearray()
        self._lock = threading.Lock()
        self._is_over = False

    def write(self, data: bytes) -> None:
        """See `UploadWriter.write`."""
        with self._lock:
            self._check()
            self._rest += data
            self.num_bytes += len(data)
            whole = len(self._rest) // CHUNK_BYTES * CHUNK_BYTES
            for begin in range(0, whole, _GROUP_BYTES):
                self._put(bytes(self._rest[begin : min(begin + _GROUP_BYTES, whole)]))
            del self._rest[:whole]

    def keep(self, record: FileRecord, max_files: int, max_bytes: int) -> tuple[ScriptReply, Sequence[int]]:
        """Make it a file, and return the reply of the script `ADD`.

        Args:
            record: the file.
            max_files: maximum number of the tenant's files.
            max_bytes: maximum size of the tenant's files together.
        """
        with self._lock:
            self._check()
            if self._rest or not self._writer.count:  # a file that was lost on the way is never an empty one
                self._put(bytes(self._rest))
                self._rest.clear()
            sealed = self._writer.seal.sealed(b"r", record)
            reply, values = self._calls.run(
                scripts.ADD, self._name, self._writer.count, self._calls.seal.tenant(record.tenant), record.num_bytes,
                max_files, max_bytes, self._calls.max_bytes, 1000 * record.expires_at, sealed,
            )  # fmt: skip
            if reply is ScriptReply.MOVED:
                raise _expired()
            self._is_over = reply is ScriptReply.DONE
        return reply, values

    def drop(self) -> None:
        """See `UploadWriter.drop`; what cannot be deleted expires."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            try:
                self._calls.run(scripts.DROP, self._name)
            except Unavailable:
                return

    def _check(self) -> None:
        if self._is_over:
            raise _expired()

    def _put(self, data: bytes) -> None:
        chunks = self._writer.sealed(data)
        ttl = round(1e3 * UPLOAD_SECONDS)
        reply, _ = self._calls.run(
            scripts.PUT, self._name, self._writer.count, self._calls.upload_bytes, ttl, *chunks
        )  # fmt: skip
        if reply is not ScriptReply.DONE:
            raise _expired()
        self._writer.count += len(chunks)


class ChunkReader(io.RawIOBase):
    """Reads a content from its beginning, some chunks at a time. Wrapped in a buffer, it is a binary file."""

    def __init__(self, calls: SharedCalls, file_id: str, first: int = 0) -> None:
        """Open a content.

        Args:
            calls: calls scripts.
            file_id: id of the file.
            first: number of the chunk at which it begins.

        Raises:
            NoSuchFile: there is no such file.
            Unavailable: the server does not answer.
        """
        super().__init__()
        self._calls, self._file_id, self._name = calls, file_id, calls.seal.file(file_id)
        self._seal = calls.seal.seal(b"file:" + self._name)
        self._next, self._end = first, first
        self._left: int | None = None
        """Bytes that the record of a file says are left; `None` for results of a batch that is not over."""
        self._data = memoryview(b"")
        self._fetch()

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the content."""
        return self._end

    def readable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def readinto(self, buffer: "memoryview | bytearray") -> int:  # type: ignore[override]  # all that io passes
        """See `io.RawIOBase`.

        Raises:
            NoSuchFile: the file was deleted meanwhile.
            Unavailable: the server does not answer, or the content is not whole.
        """
        while not self._data:
            if self._next >= self._end:
                if self._left:
                    raise self._broken()
                return 0
            self._fetch()
        count = min(len(buffer), len(self._data))
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        return count

    def _fetch(self) -> None:
        reply, values = self._calls.run(scripts.READ, self._name, self._next, CHUNK_BYTES)
        if reply is not ScriptReply.DONE:
            raise NoSuchFile(f"file {self._file_id!r} was deleted", field="file_id")
        end, record, _, _, *sealed = values
        if self._next == 0 and record:
            opened = self._seal.opened(b"r", record, FileRecord)
            if opened is None:
                raise self._broken()
            self._left = opened.num_bytes
        self._end = end
        parts = list[bytes]()
        for chunk in sealed:
            part = self._seal.opened(b"%d" % self._next, chunk, bytes)
            if part is None:
                raise self._broken()
            parts.append(part)
            self._next += 1
        self._data = memoryview(b"".join(parts))
        if self._left is not None:
            self._left -= len(self._data)

    def _broken(self) -> Unavailable:
        self._calls.foreign("a content")
        return Unavailable(
            f"file {self._file_id!r} cannot be read: its content in Redis is not what was stored; upload the file "
            "again",
            reason="FILE_DAMAGED",
            field="file_id",
        )


class SharedResults:
    """Results of a batch that is not over; see `ResultLines`."""

    def __init__(self, calls: SharedCalls, file_id: str, lease: int) -> None:
        """Open or create the results; earlier writers are refused from then on.

        Args:
            calls: calls scripts.
            file_id: id of the file.
            lease: number of the lease of the run.

        Raises:
            Unavailable: the server does not answer.
            LeaseLost: another gateway runs the batches.
        """
        self.done, self.size, self.count = set[str](), 0, 0
        self._calls, self._file_id, self._name = calls, file_id, calls.seal.file(file_id)
        self._writer = _ChunkWriter(calls, file_id)
        self._holder = (calls.gateway, lease)
        self._lock = threading.Lock()
        _, (self._opening,) = calls.run(scripts.OPEN_RESULTS, self._name, *self._holder)
        self._catch_up()

    def append(self, lines: bytes) -> None:
        """See `ResultLines.append`."""
        with self._lock:
            for group in _groups(lines):
                self._append(group)

    def close(self) -> None:
        """See `ResultLines.close`."""

    def _append(self, lines: bytes) -> None:
        """Append lines with one call, except for those that an earlier call without an answer has appended."""
        left = b"".join(line for line in io.BytesIO(lines) if done_id(line) not in self.done)
        if not left:
            return
        chunks = self._writer.sealed(left)
        reply, _ = self._calls.run(
            scripts.APPEND, self._name, *self._holder, self._opening, self._writer.count, self._calls.max_bytes,
            len(left), *chunks,
        )  # fmt: skip
        if reply is ScriptReply.DONE:
            self._writer.count += len(chunks)
            self._add(io.BytesIO(left))
            return
        before = self._writer.count
        self._catch_up()
        if self._writer.count <= before:
            raise ResultsLost("Redis has lost results of a batch; what is left is read again")
        self._append(lines)

    def _catch_up(self) -> None:
        """Read the lines that this object does not know."""
        reader = ChunkReader(self._calls, self._file_id, self._writer.count)
        with io.BufferedReader(reader) as file:
            self._add(file)
        self._writer.count = reader.num_chunks

    def _add(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            name = done_id(line)
            if name is None:
                raise Unavailable(f"the results {self._file_id!r} have a line that is not whole", reason="FILE_DAMAGED")
            self.done.add(name)
            self.size += len(line)
            self.count += 1


class _ChunkWriter:
    """Seals the chunks of one file in their order."""

    def __init__(self, calls: SharedCalls, file_id: str) -> None:
        self.seal = calls.seal.seal(b"file:" + calls.seal.file(file_id))
        self.count = 0
        """Number of the written chunks."""

    def sealed(self, data: bytes) -> list[bytes]:
        """Return the next chunks."""
        return [
            self.seal.sealed(b"%d" % (self.count + number), data[begin : begin + CHUNK_BYTES])
            for number, begin in enumerate(range(0, max(1, len(data)), CHUNK_BYTES))
        ]


def _groups(lines: bytes) -> Iterator[bytes]:
    """Yield whole lines, as many together as one call appends."""
    begin = 0
    while begin < len(lines):
        end = lines.rfind(b"\n", begin, begin + _GROUP_BYTES) + 1 or lines.find(b"\n", begin) + 1 or len(lines)
        yield lines[begin:end]
        begin = end


def _expired() -> Unavailable:
    return Unavailable(
        f"the upload is not there any more: it had no further data for {UPLOAD_SECONDS:g} s, or Redis has lost it; "
        "send the file again",
        reason="UPLOAD_LOST",
        field="file",
    )
