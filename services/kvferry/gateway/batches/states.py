"""The states of a batch and their transitions."""

from enum import StrEnum

from kvferry.core.states import Machine


class BatchState(StrEnum):
    """State of a batch, named as in OpenAI's API; transitions are in `BATCH_MACHINE`."""

    VALIDATING = "validating"
    """The lines of the input file are being checked, or wait for this."""
    FAILED = "failed"
    """The input file is invalid; no line was computed."""
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    """All lines are computed; the files of the results are being registered."""
    COMPLETED = "completed"
    EXPIRED = "expired"
    """The window ended first; the results so far are available."""
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    """The client cancelled the batch; the results so far are available."""


class BatchEvent(StrEnum):
    """Event that changes the state of a batch."""

    ACCEPT = "accept"
    """Each line of the input is valid."""
    REFUSE = "refuse"
    FINISH = "finish"
    """The last line was computed."""
    COMPLETE = "complete"
    EXPIRE = "expire"
    CANCEL = "cancel"
    STOP = "stop"
    """The lines of a cancelled batch have ended."""


BATCH_MACHINE: Machine[BatchState, BatchEvent] = Machine(
    name="batch",
    initial=BatchState.VALIDATING,
    final=frozenset({BatchState.FAILED, BatchState.COMPLETED, BatchState.EXPIRED, BatchState.CANCELLED}),
    table={
        (BatchState.VALIDATING, BatchEvent.ACCEPT): BatchState.IN_PROGRESS,
        (BatchState.VALIDATING, BatchEvent.REFUSE): BatchState.FAILED,
        (BatchState.VALIDATING, BatchEvent.CANCEL): BatchState.CANCELLING,
        (BatchState.VALIDATING, BatchEvent.EXPIRE): BatchState.EXPIRED,
        (BatchState.IN_PROGRESS, BatchEvent.FINISH): BatchState.FINALIZING,
        (BatchState.IN_PROGRESS, BatchEvent.CANCEL): BatchState.CANCELLING,
        (BatchState.IN_PROGRESS, BatchEvent.EXPIRE): BatchState.EXPIRED,
        (BatchState.FINALIZING, BatchEvent.COMPLETE): BatchState.COMPLETED,
        (BatchState.CANCELLING, BatchEvent.STOP): BatchState.CANCELLED,
    },
)
