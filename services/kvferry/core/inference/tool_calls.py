"""Tool calls of a model, whole or in the parts in which they are generated."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of a tool call. The first part of a call has its id and name; the arguments of all parts concatenate to
    the call's arguments."""

    index: int
    """Number of the call in its answer, from 0."""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    """JSON text."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call."""

    call_id: str
    name: str
    arguments: str
    """JSON text; truncated if the answer was."""


@dataclass(slots=True)
class AssembledCalls:
    """The calls of an answer, assembled from their parts."""

    _heads: dict[int, CallDelta] = field(default_factory=dict)
    _arguments: dict[int, list[str]] = field(default_factory=dict)

    def add(self, deltas: Iterable[CallDelta]) -> None:
        """Add the parts of calls found in one piece of generated text."""
        for delta in deltas:
            self._heads.setdefault(delta.index, delta)
            self._arguments.setdefault(delta.index, []).append(delta.arguments)

    def whole(self) -> tuple[ToolCall, ...]:
        """Return the calls so far, in order."""
        return tuple(
            ToolCall(head.call_id, head.name, "".join(self._arguments[index]))
            for index, head in sorted(self._heads.items())
        )
