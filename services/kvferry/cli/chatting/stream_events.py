"""Reads a stream of chat chunks: server-sent events as bytes, their data as typed chunks."""

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from kvferry.core.errors import Unavailable
from kvferry.core.inference.chunks import Timing

_MAX_EVENT_BYTES = 4 << 20
_MAX_ID_BYTES = 256
_MAX_SECONDS = 1e7
"""Times above this bound are not believed, so that they cannot spoil a drawing."""
DONE = "[DONE]"
"""Data of the last event of a stream that did not fail."""


class ServerSentEvents:
    """Splits the bytes of a stream into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._id = b""
        self.last_id = ""
        """Id of the last event that was yielded; empty if none had one."""

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Add bytes, and yield the data of each event that they complete. Comments and events without data are left
        out; an event that the stream's end cuts is never yielded.

        Raises:
            Unavailable: an event is too large, or not UTF-8.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"id:"):
                self._id = line[3:].removeprefix(b" ")
            elif not line and self._data:
                if len(self._id) <= _MAX_ID_BYTES and self._id.isascii():
                    self.last_id = self._id.decode()
                whole, self._data = b"\n".join(self._data), []
                try:
                    yield whole.decode()
                except UnicodeDecodeError:
                    raise broken("an event is not UTF-8") from None
        if len(self._rest) + sum(map(len, self._data)) > _MAX_EVENT_BYTES:
            raise broken(f"an event has more than {_MAX_EVENT_BYTES} bytes")


class StreamedFunction(Struct):
    """Name of a called function, in its first part, and a part of its arguments."""

    name: str | None = None
    arguments: str | None = None


class StreamedCall(Struct):
    """A part of a tool call."""

    index: int = 0
    function: StreamedFunction | None = None


class StreamedDelta(Struct):
    """What a chunk adds to a message."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[StreamedCall] | None = None


class StreamedChoice(Struct):
    """The first choice of a chunk; no other one is requested."""

    delta: StreamedDelta | None = None
    finish_reason: str | None = None


class StreamedPromptTokens(Struct):
    """Details of the prompt's tokens."""

    cached_tokens: int = 0


class StreamedUsage(Struct):
    """Token counts of an answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: StreamedPromptTokens | None = None


class StreamedError(Struct):
    """OpenAI's error object."""

    message: str = ""
    code: str | int | None = None


class StreamedChunk(Struct):
    """The data of one event."""

    choices: list[StreamedChoice] = []
    usage: StreamedUsage | None = None
    kvferry: msgspec.Raw = msgspec.Raw()
    """Timing of the answer, empty if there is none; see `timing_of`."""
    error: StreamedError | None = None


_CHUNKS = msgspec.json.Decoder(StreamedChunk)
_TIMINGS = msgspec.json.Decoder(Timing)


def parse_chunk(data: str) -> StreamedChunk:
    """Parse the data of an event.

    Raises:
        Unavailable: it is no chunk of a chat.
    """
    try:
        return _CHUNKS.decode(data)
    except (msgspec.DecodeError, RecursionError):
        raise broken("an event is not a chunk of a chat") from None


def timing_of(chunk: StreamedChunk) -> Timing | None:
    """Return the timing in a chunk; `None` if there is none, or none that can be used, as from other servers."""
    try:
        timing = _TIMINGS.decode(chunk.kvferry)
    except (msgspec.DecodeError, RecursionError):
        return None
    times = (
        timing.queue_seconds, timing.prefill_seconds, timing.first_token_seconds, timing.handoff_seconds,
        timing.total_seconds,
    )  # fmt: skip
    return timing if all(0 <= seconds < _MAX_SECONDS for seconds in times) else None


def broken(why: str) -> Unavailable:
    """Return the error for a stream that cannot be read to its end."""
    return Unavailable(f"the stream is broken: {why}; send the prompt again")
