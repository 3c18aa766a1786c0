"""The routes of files and batches, except for uploads."""

from collections.abc import Sequence
from typing import BinaryIO, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from kvferry.gateway.batches.batch_service import BatchService
from kvferry.gateway.batches.storage import BatchStorage
from kvferry.gateway.http.batches.bodies import (
    BatchesQuery,
    BatchList,
    BatchRequest,
    DeletedFile,
    FileList,
    FilesQuery,
    batch_object,
    file_object,
)
from kvferry.gateway.http.batches.switched_off import opened
from kvferry.gateway.http.batches.uploads import CreateFile
from kvferry.gateway.http.body_route import JSON, ApiContext, BodyRoute, note_ignored, while_connected
from kvferry.gateway.http.fields.query import query_fields
from kvferry.gateway.http.fields.strict import Strict, json_object, parse_fields
from kvferry.gateway.http.openai.reply import encode

OCTETS = "application/octet-stream"
_READ_BYTES = 256 << 10
Q = TypeVar("Q", bound=Strict)


class _Identified(Protocol):
    id: str


L = TypeVar("L", bound=_Identified)


class BatchRoutes:
    """Handlers of all routes of files and batches."""

    def __init__(self, context: ApiContext, service: BatchService | None) -> None:
        """
        Args:
            context: the client API: limits and authentication.
            service: the files and batches; `None` if this gateway keeps none.
        """
        self._context, self._service = context, service
        self.create_file = CreateFile(context, service)
        self.content = _FileContent(context, service)
        self.create_batch = _CreateBatch(context, service)

    async def files(self, request: Request) -> Response:
        """Answer GET /v1/files."""
        tenant, service = self._called(request)
        query = _query(FilesQuery, request)
        found = await service.files(
            tenant,
            limit=query.limit + 1,
            after=query.after,
            is_ascending=query.order == "asc",
            purpose=query.purpose,
        )
        page, has_more = _page([file_object(record) for record in found], query.limit)
        return _answer(FileList(page, *_ends(page), has_more))

    async def file(self, request: Request) -> Response:
        """Answer GET /v1/files/{file_id}."""
        tenant, service = self._called(request)
        return _answer(file_object(await service.file(tenant, request.path_params["file_id"])))

    async def delete_file(self, request: Request) -> Response:
        """Answer DELETE /v1/files/{file_id}."""
        tenant, service = self._called(request)
        file_id: str = request.path_params["file_id"]
        await service.delete_file(tenant, file_id)
        return _answer(DeletedFile(file_id))

    async def batches(self, request: Request) -> Response:
        """Answer GET /v1/batches."""
        tenant, service = self._called(request)
        query = _query(BatchesQuery, request)
        found = await service.batches(tenant, limit=query.limit + 1, after=query.after)
        page, has_more = _page([batch_object(record) for record in found], query.limit)
        return _answer(BatchList(page, *_ends(page), has_more))

    async def batch(self, request: Request) -> Response:
        """Answer GET /v1/batches/{batch_id}."""
        tenant, service = self._called(request)
        return _answer(batch_object(await service.batch(tenant, request.path_params["batch_id"])))

    async def cancel_batch(self, request: Request) -> Response:
        """Answer POST /v1/batches/{batch_id}/cancel; a body has no meaning."""
        tenant, service = self._called(request)
        return _answer(batch_object(await service.cancel_batch(tenant, request.path_params["batch_id"])))

    def _called(self, request: Request) -> tuple[str, BatchService]:
        tenant = self._context.caller(request).tenant
        return tenant, opened(self._service)


class _FileContent(BodyRoute):
    """ASGI handler of GET /v1/files/{file_id}/content."""

    def __init__(self, context: ApiContext, service: BatchService | None) -> None:
        super().__init__(context)
        self._service = service

    async def serve(self, request: Request, send: Send) -> None:
        """See `BodyRoute.serve`."""
        tenant = self.context.caller(request).tenant
        service = opened(self._service)
        record, file = await service.open_content(tenant, request.path_params["file_id"])
        try:
            await while_connected(request.receive, _send_file(service.storage, file, record.num_bytes, send))
        finally:
            await service.storage.run(file.close)


async def _send_file(storage: BatchStorage, file: BinaryIO, num_bytes: int, send: Send) -> None:
    headers = [(b"content-type", OCTETS.encode()), (b"content-length", str(num_bytes).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    place = 0
    while place < num_bytes:
        data = await storage.run(file.read, min(_READ_BYTES, num_bytes - place))
        if not data:
            raise OSError(f"the file has {place} bytes instead of {num_bytes}")
        place += len(data)
        await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class _CreateBatch(BodyRoute):
    """ASGI handler of POST /v1/batches."""

    def __init__(self, context: ApiContext, service: BatchService | None) -> None:
        super().__init__(context)
        self._service = service

    async def serve(self, request: Request, send: Send) -> None:
        """See `BodyRoute.serve`."""
        async with self.body(request) as (caller, body):
            asked = parse_fields(BatchRequest, json_object(body), is_strict=self.context.config.strict_fields)
        expires = asked.output_expires_after
        record = await opened(self._service).create_batch(
            caller.tenant,
            asked.input_file_id,
            asked.endpoint,
            asked.metadata,
            None if expires is None else expires.seconds,
        )
        note_ignored(request, asked.ignored)
        await _answer(batch_object(record))(request.scope, request.receive, send)


def _answer(body: object) -> Response:
    return Response(encode(body), media_type=JSON)


def _query(kind: type[Q], request: Request) -> Q:
    return parse_fields(kind, query_fields(request.query_params), is_strict=True)


def _page(found: list[L], limit: int) -> tuple[list[L], bool]:
    """Return the objects of a page, and whether there are more."""
    return found[:limit], len(found) > limit


def _ends(page: Sequence[_Identified]) -> tuple[str | None, str | None]:
    """Return the ids of the first and the last object."""
    return (page[0].id, page[-1].id) if page else (None, None)
