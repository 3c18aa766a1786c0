"""Receives POST /v1/files: a form whose file is stored while it arrives."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Send

from kvferry.core.errors import InvalidRequest, KvferryError, RequestCancelled, shortened
from kvferry.gateway.batches.batch_service import BatchService
from kvferry.gateway.batches.storage import UploadWriter
from kvferry.gateway.http.batches.bodies import FileUpload, file_object
from kvferry.gateway.http.batches.multipart import MultipartReader, Part, boundary_of
from kvferry.gateway.http.batches.switched_off import opened
from kvferry.gateway.http.body_route import (
    JSON,
    ApiContext,
    BodyRoute,
    BodyTooLarge,
    BodyTooSlow,
    UnsupportedMedia,
    discard_body,
    note_ignored,
)
from kvferry.gateway.http.fields.strict import parse_fields
from kvferry.gateway.http.openai.reply import encode

UPLOAD_SECONDS = 3600.0
"""Time limit of an upload; each piece must arrive within `HttpConfig.body_timeout_seconds` besides."""
_FORM_BYTES = 64 << 10
"""Maximum size of a form besides its file."""
_FIELD_BYTES = 4096
_WRITTEN_AT_ONCE = 1 << 20
_MAX_NAME_CHARS = 255
_NESTED = re.compile(r"(\w{1,64})\[(\w{1,64})\]")
_MAX_LENGTH_DIGITS = 18


class _Form:
    """The fields of a form, and the file that is being written."""

    def __init__(self, upload: UploadWriter, service: BatchService) -> None:
        self.fields: dict[str, Any] = {}
        self.filename = ""
        self._seen = set[str]()
        """Names of the fields."""
        self._upload, self._limit = upload, service.config.max_file_bytes
        self._run = service.storage.run
        self._name = ""
        self._text = bytearray()
        self._file = bytearray()
        self._file_bytes = 0

    def begin(self, part: Part) -> None:
        """Begin a part.

        Raises:
            InvalidRequest: the form has two files, or the field before it was given twice.
        """
        self._end_field()
        self._name = part.name
        if part.name == "file":
            if "file" in self.fields:
                raise InvalidRequest("file is given twice; send one file in each request", field="file")
            self.filename = (part.filename or "file")[:_MAX_NAME_CHARS]
            self.fields["file"] = self.filename

    async def add(self, content: bytes) -> None:
        """Add content of the part.

        Raises:
            BodyTooLarge: the file is too large.
            InvalidRequest: the field is too long.
            Unavailable: the file cannot be written.
        """
        if self._name != "file":
            self._text += content
            if len(self._text) > _FIELD_BYTES:
                name = shortened(self._name)
                raise InvalidRequest(f"{name} has more than {_FIELD_BYTES} bytes; shorten it", field=name)
            return
        self._file_bytes += len(content)
        if self._file_bytes > self._limit:
            raise too_large("the file", f"more than {self._limit}", self._limit)
        self._file += content
        if len(self._file) >= _WRITTEN_AT_ONCE:
            await self._write()

    async def end(self) -> None:
        """Write the rest."""
        self._end_field()
        await self._write()

    async def _write(self) -> None:
        data, self._file = bytes(self._file), bytearray()
        await self._run(self._upload.write, data)

    def _end_field(self) -> None:
        if self._name not in ("", "file"):
            text = self._text.decode("utf-8", "replace")
            if self._name in self._seen:
                name = shortened(self._name)
                raise InvalidRequest(f"{name} is given twice; give it once", field=name)
            self._seen.add(self._name)
            nested = _NESTED.fullmatch(self._name)
            inner = self.fields.setdefault(nested[1], {}) if nested is not None else None
            if nested is not None and isinstance(inner, dict):
                inner[nested[2]] = int(text) if nested[2] == "seconds" and re.fullmatch(r"\d{1,18}", text) else text
            else:
                self.fields[self._name] = text
        self._text.clear()
        self._name = ""


class CreateFile(BodyRoute):
    """ASGI handler of POST /v1/files."""

    def __init__(self, context: ApiContext, service: BatchService | None) -> None:
        super().__init__(context)
        self._service = service

    async def serve(self, request: Request, send: Send) -> None:
        """See `BodyRoute.serve`."""
        tenant, is_whole = self.context.caller(request).tenant, False

        async def receive() -> Message:
            nonlocal is_whole
            message = await request.receive()
            is_whole = not message.get("more_body", False)
            return message

        try:
            answer, ignored = await self._receive(Request(request.scope, receive), tenant)
        except KvferryError as error:
            if not is_whole and not isinstance(error, BodyTooSlow):
                await discard_body(request)
            raise
        note_ignored(request, ignored)
        await Response(answer, media_type=JSON)(request.scope, request.receive, send)

    async def _receive(self, request: Request, tenant: str) -> tuple[bytes, tuple[str, ...]]:
        service = opened(self._service)
        reader = MultipartReader(_boundary(request))
        most = service.config.max_file_bytes
        size = _declared_size(request, most + _FORM_BYTES)
        async with service.receiving(tenant, min(most, most if size is None else size)) as upload:
            form = _Form(upload, service)
            try:
                async with asyncio.timeout(UPLOAD_SECONDS):
                    await _read(request, reader, form, self.context.config.body_timeout_seconds)
            except TimeoutError:
                raise BodyTooSlow(f"the body did not arrive within {UPLOAD_SECONDS:g} s") from None
            if not reader.is_complete:
                raise InvalidRequest("the body ends before the last boundary of its form; send all of it")
            await form.end()
            fields = parse_fields(FileUpload, form.fields, is_strict=self.context.config.strict_fields)
            seconds = None if fields.expires_after is None else fields.expires_after.seconds
            record = await service.add_file(tenant, upload, fields.purpose, form.filename, seconds)
        return encode(file_object(record)), fields.ignored


async def _read(request: Request, reader: MultipartReader, form: _Form, piece_seconds: float) -> None:
    """Read a body into a form.

    Args:
        request: the request, before its body is read.
        reader: splits the body into parts.
        form: the form.
        piece_seconds: time limit for each piece of the body.
    """
    num_bytes = 0
    async for piece in _pieces(request, piece_seconds):
        num_bytes += len(piece)
        for event in reader.feed(piece):
            if isinstance(event, Part):
                form.begin(event)
            else:
                await form.add(event)


async def _pieces(request: Request, seconds: float) -> AsyncIterator[bytes]:
    async with aclosing(request.stream()) as stream:
        while True:
            try:
                async with asyncio.timeout(seconds):
                    piece = await anext(stream, None)
            except TimeoutError:
                raise BodyTooSlow(f"no further part of the body arrived within {seconds:g} s") from None
            except ClientDisconnect:
                raise RequestCancelled("the client disconnected while sending") from None
            if piece is None:
                return
            yield piece


def _boundary(request: Request) -> bytes:
    kind = request.headers.get("content-type", "")
    boundary = boundary_of(kind)
    if boundary is None or request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMedia(
            f"the body must be sent as plain multipart/form-data with a boundary, not as {shortened(kind)!r}"
        )
    return boundary


def _declared_size(request: Request, limit: int) -> int | None:
    """Return the declared size of the body in bytes; `None` if it is sent in chunks.

    Raises:
        BodyTooLarge: it exceeds the limit.
    """
    length = request.headers.get("content-length", "")
    if not length.isdecimal():
        return None
    if len(length) > _MAX_LENGTH_DIGITS or int(length) > limit:
        raise too_large("the body", shortened(length), limit)
    return int(length)


def too_large(what: str, size: str, limit: int) -> BodyTooLarge:
    """Return the error for a file that is too large."""
    return BodyTooLarge(
        f"{what} has {size} bytes; at most {limit} are accepted (setting max_file_bytes); send several files",
        field="file",
    )
