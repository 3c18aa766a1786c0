"""Reads multipart/form-data piece by piece, in bounded memory. No I/O.

--boundary, headers, empty line, content, --boundary, headers, empty line, content, .., --boundary--
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from kvferry.core.errors import InvalidRequest, shortened

MAX_PARTS = 32
MAX_HEADER_BYTES = 8192
"""Maximum size of the headers of a part."""
_TYPE = re.compile(r"\s*multipart/form-data\s*(;.*)", re.IGNORECASE | re.DOTALL)
_PARAMETER = re.compile(r';\s*([\w!#$%&\'*+.^`|~-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))\s*')
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_HEADERS_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Part:
    """Beginning of a part."""

    name: str
    filename: str | None
    """`None` if the part is a field."""


Event = Part | bytes
"""Beginning of a part, or further bytes of its content."""


class _State(Enum):
    BOUNDARY = auto()
    """At the beginning of the body, or after a boundary."""
    HEADERS = auto()
    CONTENT = auto()
    END = auto()


def boundary_of(content_type: str) -> bytes | None:
    """Return the boundary of a content type; `None` if it is not multipart/form-data with a valid boundary."""
    found = _TYPE.fullmatch(content_type)
    boundary = "" if found is None else _parameters(found[1]).get("boundary", "")
    return boundary.encode() if _BOUNDARY.fullmatch(boundary) else None


class MultipartReader:
    """Reads one body."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._rest = bytearray(b"\r\n")  # the first boundary is at the beginning of the body
        self._state = _State.BOUNDARY
        self._is_first = True
        self._is_at_begin = True
        self._num_parts = 0

    @property
    def is_complete(self) -> bool:
        """Whether the last boundary was read; bytes after it have no meaning."""
        return self._state is _State.END

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield what further bytes of the body complete. Each iterator is used up before the next call.

        Raises:
            InvalidRequest: the body is malformed, or a bound is exceeded.
        """
        if self.is_complete:
            return
        self._rest += data
        while True:
            before = self._state
            event = self._step()
            if event:
                yield event
            if event is None and self._state is before:
                return  # more bytes are needed

    def _step(self) -> Event | None:
        """Take the next part of the bytes; return an event, if there is one."""
        match self._state:
            case _State.BOUNDARY:
                self._take_boundary()
            case _State.HEADERS:
                return self._take_headers()
            case _State.CONTENT:
                return self._take_content()
            case _State.END:
                self._rest.clear()
        return None

    def _take_boundary(self) -> None:
        head = self._delimiter if self._is_first else b""
        if len(self._rest) < len(head) + 2 and head.startswith(self._rest[: len(head)]):
            return
        end = bytes(self._rest[len(head) : len(head) + 2])
        if not self._rest.startswith(head) or end not in (b"--", b"\r\n"):
            raise _malformed("a boundary of its content-type must be here, followed by a line break")
        self._is_first = False
        if end == b"--":
            self._state = _State.END
            return
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequest(f"the form has more than {MAX_PARTS} parts; send fewer")
        del self._rest[: len(head)]  # the line break may begin the empty line that ends a part without headers
        self._state = _State.HEADERS

    def _take_headers(self) -> Part | None:
        place = self._rest.find(_HEADERS_END)
        if place > MAX_HEADER_BYTES or (place < 0 and len(self._rest) > MAX_HEADER_BYTES + len(_HEADERS_END)):
            raise InvalidRequest(f"the headers of a part have more than {MAX_HEADER_BYTES} bytes; shorten them")
        if place < 0:
            return None
        head = bytes(self._rest[:place])
        # The line break before the content stays: it may begin the boundary that ends an empty content.
        del self._rest[: place + 2]
        self._state = _State.CONTENT
        self._is_at_begin = True
        return _part(head)

    def _take_content(self) -> bytes | None:
        begin = 2 if self._is_at_begin else 0
        place = self._rest.find(self._delimiter)
        if place >= 0:
            content = bytes(self._rest[begin:place])
            del self._rest[: place + len(self._delimiter)]
            self._state = _State.BOUNDARY
            return content
        safe = len(self._rest) - len(self._delimiter) + 1
        if safe <= begin:
            return None
        content = bytes(self._rest[begin:safe])
        del self._rest[:safe]
        self._is_at_begin = False
        return content


def _part(head: bytes) -> Part:
    """Return the part with these headers."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            kind, mark, rest = value.partition(";")
            given = _parameters(mark + rest)
            if kind.strip().lower() == "form-data" and "name" in given:
                return Part(given["name"], given.get("filename"))
    raise _malformed("a part has no header content-disposition: form-data with a name")


def _parameters(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, quoted, plain in _PARAMETER.findall(text):
        found.setdefault(name.lower(), re.sub(r"\\(.)", r"\1", quoted) if quoted else plain)
    return found


def _malformed(what: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not valid multipart/form-data: {shortened(what) if len(what) > 200 else what}")
