"""An answer as it is received: its parts for the screen, and its text, times and token counts at the end."""

from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.cli.chatting.stream_events import StreamedChunk, StreamedUsage, timing_of
from kvferry.core.inference.chunks import Timing


class PartKind(StrEnum):
    """What a part of an answer is."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True)
class ReceivedAnswer:
    """The answer so far."""

    sent_at: float
    """Time at which the request was sent, in the clock's seconds, as are the other times."""
    first_at: float | None = None
    """Time of the first part; `None` if there is none."""
    ended_at: float = 0.0
    finish_reason: str = ""
    """Why the answer ended; empty if it did not end by itself."""
    usage: StreamedUsage | None = None
    timing: Timing | None = None
    _texts: list[str] = field(default_factory=list)
    _calls: dict[int, str] = field(default_factory=dict)

    def add(self, chunk: StreamedChunk, now: float) -> list[tuple[PartKind, str]]:
        """Add a chunk; return what it adds to the screen.

        Args:
            chunk: the next chunk.
            now: time of its arrival.
        """
        self.ended_at = now
        self.usage = chunk.usage or self.usage
        self.timing = timing_of(chunk) or self.timing
        parts: list[tuple[PartKind, str]] = []
        for choice in chunk.choices[:1]:
            if choice.delta is not None:
                delta = choice.delta
                parts += [(PartKind.REASONING, delta.reasoning or delta.reasoning_content or "")]
                parts += [(PartKind.TEXT, delta.content or "")]
                for call in delta.tool_calls or ():
                    if call.function is not None:
                        name, arguments = call.function.name or "", call.function.arguments or ""
                        parts += [(PartKind.CALL, self._call(call.index, name, arguments))]
                self._texts.append(delta.content or "")
            self.finish_reason = choice.finish_reason or self.finish_reason
        parts = [(kind, text) for kind, text in parts if text]
        if parts and self.first_at is None:
            self.first_at = now
        return parts

    def _call(self, index: int, name: str, arguments: str) -> str:
        """Add a part of a call; return its text, with the name on a line of its own before the arguments."""
        is_new = index not in self._calls
        text = (f"\n[call {name}] " if is_new else name) + arguments
        self._calls[index] = self._calls.get(index, "") + text
        return text

    @property
    def content(self) -> str:
        """Text of the answer for the conversation: without reasoning; calls are text, since nothing runs them."""
        return "".join([*self._texts, *self._calls.values()]).strip("\n")

    @property
    def ttft_seconds(self) -> float | None:
        """Time to the first part as this process saw it; `None` if there is none."""
        return None if self.first_at is None else self.first_at - self.sent_at

    @property
    def total_seconds(self) -> float:
        """Time from the request to the last chunk."""
        return max(0.0, self.ended_at - self.sent_at)
