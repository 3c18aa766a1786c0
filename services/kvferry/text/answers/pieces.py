"""Pieces of generated text: reasoning, content, and parts of tool calls."""

from dataclasses import dataclass

from kvferry.core.inference.tool_calls import CallDelta


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """The parts of a piece of text; each may be empty."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    """At most one delta per call, in the order of the calls."""


class NotACall(Exception):
    """The text is not, or no longer, a tool call in the expected format."""
