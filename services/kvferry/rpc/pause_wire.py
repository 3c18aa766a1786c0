"""Converts pauses of generation to and from `kvferry.v1` messages."""

from collections.abc import Mapping

from kvferry.core.errors import InvalidRequest
from kvferry.core.pausing import PauseMode, PauseState
from kvferry.v1 import worker_admin_pb2

_MODES: Mapping[PauseMode, "worker_admin_pb2.PauseMode.ValueType"] = {
    PauseMode.ABORT: worker_admin_pb2.PAUSE_MODE_ABORT,
    PauseMode.WAIT: worker_admin_pb2.PAUSE_MODE_WAIT,
    PauseMode.KEEP: worker_admin_pb2.PAUSE_MODE_KEEP,
}
_FROM_WIRE = {number: mode for mode, number in _MODES.items()}


def pause_mode_to_wire(mode: PauseMode | None) -> "worker_admin_pb2.PauseMode.ValueType":
    """Convert a mode; `None`, for no pause, becomes UNSPECIFIED."""
    return worker_admin_pb2.PAUSE_MODE_UNSPECIFIED if mode is None else _MODES[mode]


def pause_mode_from_wire(value: "worker_admin_pb2.PauseMode.ValueType") -> PauseMode | None:
    """Convert a mode; UNSPECIFIED becomes `None`.

    Raises:
        InvalidRequest: this version does not know the mode.
    """
    if value and value not in _FROM_WIRE:
        raise InvalidRequest(f"mode {value} is not known; use one of {', '.join(PauseMode)}", field="mode")
    return _FROM_WIRE[value] if value else None


def pause_to_wire(state: PauseState, *, is_settled: bool) -> worker_admin_pb2.PauseStatus:
    """Convert the state of a worker.

    Args:
        state: the state.
        is_settled: whether it is a pause and nothing is in flight.
    """
    return worker_admin_pb2.PauseStatus(
        revision=state.revision,
        mode=pause_mode_to_wire(state.mode),
        by=state.by,
        since=state.since,
        settled=is_settled,
    )


def pause_from_wire(message: worker_admin_pb2.PauseStatus) -> PauseState:
    """Convert the state of a worker; a mode that this version does not know becomes `keep`, as nothing may run."""
    mode = _FROM_WIRE.get(message.mode, PauseMode.KEEP) if message.mode else None
    return PauseState(message.revision, mode, message.by, message.since)
