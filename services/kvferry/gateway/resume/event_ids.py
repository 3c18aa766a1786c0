"""Ids of the events of a stream, with which a client continues it at another gateway. No I/O.

    STREAM.TOKENS.PART.CHECK    for example  aSg3kQAAAAAAAAAB.37.0.1a2b3c4d

| part | content |
| --- | --- |
| STREAM | 12 bytes, base64url: Unix time of the answer, 8 random bytes |
| TOKENS | number of output tokens whose text the client has after this event |
| PART | what it has besides, a value of `EventPart` |
| CHECK | CRC-32 of the body, the prompt and these tokens, 8 hexadecimal digits |
"""

import base64
import re
import secrets
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvferry.core.errors import InvalidRequest, ResumeRefused, shortened
from kvferry.core.sampling import SampledToken

HEADER = "last-event-id"
"""Request header with the id of the last event that a client has received."""
_TIME_BYTES, _RANDOM_BYTES = 4, 8
_ID = re.compile(r"([A-Za-z0-9_-]{16})\.(0|[1-9][0-9]{0,6})\.([0-3])\.([0-9a-f]{8})")


class EventPart(IntEnum):
    """What a client has of a stream besides the text of its tokens so far."""

    TEXT = 0
    """No more than that, and the role before the first token."""
    ALL_TEXT = 1
    """The text that is known only at the end of the stream too."""
    FINISH = 2
    """The finish reason too."""
    USAGE = 3
    """The usage too."""


def new_stream_id(now: float) -> str:
    """Draw the id of a stream.

    Args:
        now: wall-clock time in seconds.
    """
    seconds = int(now) & 0xFFFFFFFF
    return base64.urlsafe_b64encode(seconds.to_bytes(_TIME_BYTES) + secrets.token_bytes(_RANDOM_BYTES)).decode()


def created_of(stream_id: str) -> int:
    """Return the Unix time in a stream id, seconds."""
    return int.from_bytes(base64.urlsafe_b64decode(stream_id)[:_TIME_BYTES])


@dataclass(frozen=True, slots=True)
class EventId:
    """Id of one event, and so the position of a client that has received it."""

    stream_id: str
    num_tokens: int
    part: EventPart
    check: int
    """CRC-32 of what the client has."""

    @classmethod
    def parse(cls, text: str) -> "EventId":
        """Parse the value of the header `Last-Event-ID`.

        Raises:
            InvalidRequest: it is no id of this API.
        """
        found = _ID.fullmatch(text.strip())
        if found is None:
            raise InvalidRequest(
                f"Last-Event-ID is {shortened(repr(text))}, which is no id of an event of this API; send the id of the "
                "last event that arrived, or leave the header out to begin a new stream",
                field="Last-Event-ID",
            )
        stream_id, num_tokens, part, check = found.groups()
        return cls(stream_id, int(num_tokens), EventPart(int(part)), int(check, 16))

    def __str__(self) -> str:
        return f"{self.stream_id}.{self.num_tokens}.{int(self.part)}.{self.check:08x}"


class EventIds:
    """Ids of the events of one stream in order, and which of them the client has already."""

    def __init__(self, stream_id: str, digest: bytes, after: EventId | None = None) -> None:
        """
        Args:
            stream_id: id of the stream.
            digest: digest of the request's body and prompt, with which the checksum begins.
            after: id of the last event that the client has; `None` for a new stream.

        Raises:
            ResumeRefused: the client has the beginning of the answer to another request.
        """
        self._stream_id = stream_id.encode()
        self._check = self._first_check = zlib.crc32(digest)
        self._after = after
        self._is_verified = after is None
        self._num_tokens = 0
        self._is_last = False
        self.is_finished = False
        """Whether the event with the finish reason was made."""
        if after is not None and after.num_tokens == 0 and not after.part:
            self._verify(after)

    def add(self, tokens: Sequence[SampledToken], *, is_last: bool) -> None:
        """Add a chunk, before the ids of its events are made.

        Args:
            tokens: tokens of the chunk; a chunk ends at the client's position.
            is_last: whether the chunk has the finish reason.

        Raises:
            ResumeRefused: the tokens are not those that the client has.
        """
        self._is_last = is_last
        if tokens:
            self._num_tokens += len(tokens)
            for token in tokens:
                self._check = zlib.crc32(token.token_id.to_bytes(4, "little"), self._check)
        after = self._after
        if self._is_verified or after is None:
            return
        if self._num_tokens == after.num_tokens and (is_last or not after.part):
            self._verify(after)
        elif is_last or self._num_tokens > after.num_tokens:
            raise _different(after, self._num_tokens)

    def next(self, part: EventPart) -> bytes | None:
        """Return the line of an event with its id; `None` if the client has the event.

        Args:
            part: what the event completes; `TEXT` stands for `ALL_TEXT` in the last chunk.
        """
        if part is EventPart.TEXT and self._is_last:
            part = EventPart.ALL_TEXT
        if part is EventPart.FINISH:
            self.is_finished = True
        after = self._after
        if after is not None and (not self._is_verified or (self._num_tokens, part) <= (after.num_tokens, after.part)):
            return None
        return b"id: %s.%d.%d.%08x\n" % (self._stream_id, self._num_tokens, part, self._check)

    def greeting(self) -> bytes | None:
        """Return the line of the event before the first token; `None` if the client has it."""
        if self._after is not None:
            return None
        return b"id: %s.0.0.%08x\n" % (self._stream_id, self._first_check)

    def _verify(self, after: EventId) -> None:
        if self._check != after.check:
            raise _different(after, self._num_tokens)
        self._is_verified = True


def _different(after: EventId, num_tokens: int) -> ResumeRefused:
    return ResumeRefused(
        f"Last-Event-ID has {after.num_tokens} tokens that this request does not generate: after {num_tokens} tokens "
        "they differ in body, prompt, tenant or tokens; send the body of the first request unchanged, or begin a new "
        "stream without Last-Event-ID",
        field="Last-Event-ID",
    )
