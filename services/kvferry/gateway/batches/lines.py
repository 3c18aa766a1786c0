"""Reads the lines of a batch's input file, and encodes the lines of its results, in OpenAI's formats.

input   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
result  {"id": "batch_req_..", "custom_id": "a", "response": {"status_code", "request_id", "body"}, "error": null}
"""

import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, BinaryIO

import msgspec
from msgspec import Raw, Struct

from kvferry.core.errors import encodable, shortened
from kvferry.gateway.batches.records import LineError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_LINES = 50_000
MAX_BLANK_LINES = 1_000_000
"""Maximum number of blank lines, which take a fifth of a microsecond each, in a thread that others wait for."""
MAX_ERRORS = 100
"""Maximum number of errors that are reported for an input file."""
MAX_ID_CHARS = 512
_ENVELOPE_BYTES = 8192
"""Maximum length of a line besides its body."""
_SKIPPED_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"


class _Line(Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: Raw = Raw(b"null")


class _Peek(Struct):
    model: Any = None
    stream: Any = None


class _Done(Struct):
    custom_id: str


_line_decoder = msgspec.json.Decoder(_Line)
_peek_decoder = msgspec.json.Decoder(_Peek)
_done_decoder = msgspec.json.Decoder(_Done)
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class InputLine:
    """A valid line of an input file."""

    number: int
    """Number of the line in the file, from 1."""
    custom_id: str
    body: bytes
    """Body of the request, JSON."""
    is_stream: bool = False
    model: str | None = None


class _Wrong(Exception):
    """A line is invalid."""

    def __init__(self, code: str, message: str, param: str | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param, self.line = code, message, param, line


def numbered_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines that are not blank with their numbers from 1; `None` for a line that is too long.

    Args:
        file: the input file.
        max_bytes: maximum length of a line.

    Raises:
        _Wrong: there are more than `MAX_BLANK_LINES` blank lines.
    """
    number = num_blank = 0
    # The first line may begin with a mark, which does not count.
    while line := file.readline(max_bytes + 1 + (0 if number else len(_BOM))):
        number += 1
        if number == 1:
            line = line.removeprefix(_BOM)
        if len(line) > max_bytes:
            while line and not line.endswith(b"\n"):
                line = file.readline(_SKIPPED_BYTES)
            yield number, None
        elif not line.isspace():
            yield number, line
        else:
            num_blank += 1
            if num_blank > MAX_BLANK_LINES:
                message = f"the file has more than {MAX_BLANK_LINES} blank lines; leave them out"
                raise _Wrong("too_many_requests", message, line=number)


def read_line(number: int, line: bytes | None, endpoint: str) -> InputLine:
    """Read one line.

    Args:
        number: number of the line, from 1.
        line: the line; `None` if it is too long.
        endpoint: path that each line must have.

    Raises:
        _Wrong: the line is invalid.
    """
    if line is None:
        raise _Wrong("line_too_long", "the line is longer than a request may be; shorten its body")
    try:
        found = _line_decoder.decode(line)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise _Wrong("invalid_json_line", f"the line is not a JSON object: {shortened(str(error))}") from None
    custom_id = found.custom_id
    if custom_id is None or custom_id == "":
        raise _Wrong("missing_required_parameter", "custom_id is missing; give each line its own", "custom_id")
    if not isinstance(custom_id, str) or len(custom_id) > MAX_ID_CHARS:
        raise _Wrong("invalid_custom_id", f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters", "custom_id")
    if found.method != "POST":
        raise _Wrong("invalid_method", f"method must be 'POST', not {_shown(found.method)}", "method")
    if found.url != endpoint:
        raise _Wrong(
            "mismatched_endpoint",
            f"url must be {endpoint!r}, the endpoint of the batch, not {_shown(found.url)}",
            "url",
        )
    body = bytes(found.body)
    if not body.lstrip().startswith(b"{"):
        raise _Wrong("missing_required_parameter", "body is missing or no object; give the body of the request", "body")
    try:
        peek = _peek_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        raise _Wrong("invalid_json_line", "body is not a valid JSON object", "body") from None
    if peek.model is not None and not isinstance(peek.model, str):
        raise _Wrong("invalid_model", "body.model must be a string", "body.model")
    return InputLine(number, custom_id, body, bool(peek.stream), peek.model)


def _shown(value: object) -> str:
    return repr(shortened(value)) if isinstance(value, str) else "missing" if value is None else "another type"


@dataclass(slots=True)
class Validation:
    """Result of the check of an input file."""

    errors: list[LineError] = field(default_factory=list)
    """The first errors, at most `MAX_ERRORS`."""
    model: str | None = None
    total: int = 0
    """Number of lines."""

    def add(self, number: int | None, wrong: _Wrong) -> None:
        """Add an error of a line."""
        self.errors.append(LineError(wrong.code, encodable(wrong.message), wrong.param, number))


def validate(file: BinaryIO, endpoint: str, max_body_bytes: int) -> Validation:
    """Check each line of an input file. Blocks.

    Args:
        file: the file.
        endpoint: path that each line must have.
        max_body_bytes: maximum length of a body.

    Raises:
        OSError: the file cannot be read.
        Unavailable: likewise.
    """
    found, seen = Validation(), dict[str, int]()
    try:
        for number, text in numbered_lines(file, max_body_bytes + _ENVELOPE_BYTES):
            found.total += 1
            try:
                if found.total > MAX_LINES:
                    raise _Wrong("too_many_requests", f"the file has more than {MAX_LINES} lines; use several batches")
                _check_line(found, seen, read_line(number, text, endpoint))
            except _Wrong as wrong:
                found.add(number, wrong)
            if len(found.errors) >= MAX_ERRORS or found.total > MAX_LINES:
                break
    except _Wrong as wrong:
        found.add(wrong.line, wrong)
    if not found.total and not found.errors:
        found.add(None, _Wrong("empty_file", "the file has no lines; write one request per line"))
    return found


def _check_line(found: Validation, seen: dict[str, int], line: InputLine) -> None:
    """Check a line against those before it.

    Args:
        found: the result so far; the first line sets its model.
        seen: the number of the line of each custom_id, to which that of this line is added.
        line: the line.

    Raises:
        _Wrong: the line does not fit the others.
    """
    first = seen.setdefault(line.custom_id, line.number)
    if first != line.number:
        raise _Wrong(
            "duplicate_custom_id",
            f"custom_id {shortened(line.custom_id)!r} is also in line {first}; use different ones",
            "custom_id",
        )
    if len(seen) == 1:
        found.model = line.model
    elif line.model != found.model:
        raise _Wrong(
            "mismatched_model",
            f"body.model is {_shown(line.model)}, but the first line has {_shown(found.model)}; use one model in a "
            "batch",
            "body.model",
        )


def valid_lines(file: BinaryIO, endpoint: str, max_body_bytes: int) -> Iterator[InputLine]:
    """Yield the lines of an input file that was checked; see `validate`. If it was not, since the batch was cancelled
    before, its first valid lines."""
    numbered = numbered_lines(file, max_body_bytes + _ENVELOPE_BYTES)
    with suppress(_Wrong):  # too many blank lines
        for number, text in islice(numbered, MAX_LINES):
            with suppress(_Wrong):
                yield read_line(number, text, endpoint)


# -- results -----------------------------------------------------------------------------------------------------


class LineResponse(Struct, frozen=True):
    """Answer to the request of a line."""

    status_code: int
    request_id: str
    body: Raw
    """JSON."""


class LineFailure(Struct, frozen=True):
    """Why a line has no answer."""

    code: str
    message: str


class _Result(Struct):
    id: str
    custom_id: str
    response: LineResponse | None
    error: LineFailure | None


EXPIRED = LineFailure("batch_expired", "the completion window ended before this request was computed")
CANCELLED = LineFailure("batch_cancelled", "the batch was cancelled before this request was computed")
TENANT_GONE = LineFailure("tenant_removed", "the tenant of the batch has no API key any more")
TOO_LARGE = LineFailure(
    "storage_limit",
    "the files of the tenant reached the limit of stored bytes (setting tenant_file_bytes); delete files, and send "
    "this request again",
)
STREAMED = LineFailure("stream_not_supported", "stream must be false or left out in a batch")


def result_line(custom_id: str, response: LineResponse | None, error: LineFailure | None = None) -> bytes:
    """Return a line of an output file or error file, with its end."""
    return _encoder.encode(_Result(f"batch_req_{secrets.token_hex(12)}", custom_id, response, error)) + b"\n"


def done_id(line: bytes) -> str | None:
    """Return the custom id of a line of results; `None` if the line is not whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        return _done_decoder.decode(line).custom_id
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
