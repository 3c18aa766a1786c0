"""Records of files and batches, as they are stored and as the runner uses them."""

import secrets
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from kvferry.core.process.struct_types import describe
from kvferry.gateway.batches.batch_usage import BatchUsage
from kvferry.gateway.batches.states import BATCH_MACHINE, BatchEvent, BatchState

Purpose = Literal["batch", "batch_output"]
WINDOW_SECONDS = 24 * 3600
"""Time after its creation at which a batch expires, seconds."""


class FileRecord(Struct, frozen=True):
    """A stored file."""

    id: str
    tenant: str
    purpose: Purpose
    filename: str
    num_bytes: int
    created_at: int
    """Unix time in seconds, as each time here."""
    expires_at: int


class LineError(Struct, frozen=True):
    """An error in the input file of a batch, in the fields of OpenAI's API."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None
    """Number of the line, from 1; `None` if the error is not in one line."""


class BatchRecord(Struct, frozen=True):
    """A batch."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    status: BatchState
    created_at: int
    times: Mapping[str, int]
    """Times at which states were entered, by the name of the state."""
    output_seconds: int
    """Time after their creation at which the files of the results expire."""
    metadata: Mapping[str, str] | None = None
    model: str | None = None
    """Model of the lines; `None` before the validation."""
    errors: tuple[LineError, ...] = ()
    total: int = 0
    """Number of lines; 0 before the validation."""
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    usage: BatchUsage | None = None
    """Tokens of the completed lines; `None` before the final state."""

    @property
    def expires_at(self) -> int:
        """Time at which the window ends."""
        return self.created_at + WINDOW_SECONDS

    @property
    def is_over(self) -> bool:
        """Whether the batch is in a final state."""
        return self.status in BATCH_MACHINE.final

    def changed(self, event: BatchEvent | None, now: float, fields: Mapping[str, Any]) -> "BatchRecord | None":
        """Return the batch after an event; see `BatchRecords.change`.

        Args:
            event: changes the state; `None` for other fields of a batch in progress only.
            now: Unix time in seconds.
            fields: new values of further fields.
        """
        if event is None:
            return msgspec.structs.replace(self, **fields) if self.status is BatchState.IN_PROGRESS else None
        if not BATCH_MACHINE.allows(self.status, event):
            return None
        state = BATCH_MACHINE.next(self.status, event)
        times = {**self.times, state.value: int(now)}
        return msgspec.structs.replace(self, **{**fields, "status": state, "times": times})


describe(BatchRecord)


def new_file_id() -> str:
    """Return a random id of a file."""
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    """Return a random id of a batch."""
    return f"batch_{secrets.token_hex(12)}"


def result_ids(batch_id: str) -> tuple[str, str]:
    """Return the ids of a batch's output file and error file."""
    name = batch_id.removeprefix("batch_")
    return f"file-{name}o", f"file-{name}e"
