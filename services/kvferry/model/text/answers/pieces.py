"""What a piece of generated text consists of: reasoning, content, parts of tool calls."""

from dataclasses import dataclass


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
class Parts:
    """The parts of a piece of text; each may be empty."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    """At most one delta per call, in the order of the calls."""


class NotACall(Exception):
    """The text is not, or no longer, a tool call in the expected format."""
