"""Bodies, queries and answers of the routes of files and batches, in OpenAI's form."""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from msgspec import Struct
from pydantic import Field

from kvferry.gateway.batches.batch_usage import BatchUsage
from kvferry.gateway.batches.records import BatchRecord, FileRecord, LineError
from kvferry.gateway.batches.states import BatchState
from kvferry.gateway.http.fields import field_policy
from kvferry.gateway.http.fields.field_policy import Rules
from kvferry.gateway.http.fields.request_fields import Metadata
from kvferry.gateway.http.fields.strict import Strict

MIN_SECONDS, MAX_SECONDS = 3600, 30 * 24 * 3600
"""Range of the time after which a file expires."""
MAX_LISTED_FILES = 10_000
MAX_LISTED_BATCHES = 100


class ExpiresAfter(Strict):
    """When a file expires."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_SECONDS, le=MAX_SECONDS)]
    """Seconds after the file was created."""


class FileUpload(Strict):
    """Form of POST /v1/files."""

    RULES: ClassVar[Rules] = field_policy.FILE

    file: Annotated[str, Field(json_schema_extra={"format": "binary"})]
    """The file: one request per line."""
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None
    """By default, a file expires after 30 days."""


class BatchRequest(Strict):
    """Body of POST /v1/batches."""

    RULES: ClassVar[Rules] = field_policy.BATCH

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
    """When the files of the results expire; by default, 30 days after they were created."""


class FilesQuery(Strict):
    """Query of GET /v1/files."""

    limit: Annotated[int, Field(ge=1, le=MAX_LISTED_FILES)] = MAX_LISTED_FILES
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    """Id of the file after which the list begins; `None` to begin with the first one."""
    purpose: str | None = None


class BatchesQuery(Strict):
    """Query of GET /v1/batches."""

    limit: Annotated[int, Field(ge=1, le=MAX_LISTED_BATCHES)] = 20
    after: str | None = None
    """Id of the batch after which the list begins; `None` to begin with the newest one."""


class FileObject(Struct):
    """A file."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class FileList(Struct):
    """Response of GET /v1/files."""

    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class DeletedFile(Struct):
    """Response of DELETE /v1/files/{file_id}."""

    id: str
    object: str = "file"
    deleted: bool = True


class BatchErrors(Struct):
    """Errors in the input file of a batch."""

    data: Sequence[LineError]
    object: str = "list"


class RequestCounts(Struct):
    """Numbers of lines."""

    total: int
    completed: int
    """Lines of the output file."""
    failed: int
    """Lines of the error file."""


class BatchObject(Struct):
    """A batch."""

    id: str
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchState
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: Mapping[str, str] | None
    usage: BatchUsage | None
    """Tokens of the completed lines; set in a final state."""
    object: str = "batch"


class BatchList(Struct):
    """Response of GET /v1/batches."""

    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


def file_object(record: FileRecord) -> FileObject:
    """Return a file as it is shown to its tenant."""
    return FileObject(
        record.id, record.num_bytes, record.created_at, record.expires_at, record.filename, record.purpose
    )


def batch_object(record: BatchRecord) -> BatchObject:
    """Return a batch as it is shown to its tenant."""
    at = record.times.get
    return BatchObject(
        id=record.id,
        endpoint=record.endpoint,
        model=record.model,
        errors=BatchErrors(record.errors) if record.errors else None,
        input_file_id=record.input_file_id,
        completion_window="24h",
        status=record.status,
        output_file_id=record.output_file_id,
        error_file_id=record.error_file_id,
        created_at=record.created_at,
        in_progress_at=at("in_progress"),
        expires_at=record.expires_at,
        finalizing_at=at("finalizing"),
        completed_at=at("completed"),
        failed_at=at("failed"),
        expired_at=at("expired"),
        cancelling_at=at("cancelling"),
        cancelled_at=at("cancelled"),
        request_counts=RequestCounts(record.total, record.completed, record.failed),
        metadata=record.metadata,
        usage=record.usage,
    )
