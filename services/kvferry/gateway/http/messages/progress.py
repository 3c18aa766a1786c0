"""The progress of one answer: text chunks in, events out, and the answer so far. No I/O.

thinking ──► text ──► tool_use        each block is started, receives its deltas, and is stopped
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace
from pydantic_core import from_json

from kvferry.core.inference.chunks import TextChunk, Usage
from kvferry.core.inference.tool_calls import CallDelta
from kvferry.core.sampling import FinishReason
from kvferry.gateway.http.messages import output as out


@dataclass(slots=True)
class _OpenBlock:
    """The block that is being written."""

    start: out.Content
    """The block without content."""
    parts: list[str] = field(default_factory=list)

    def whole(self) -> out.Content:
        text = "".join(self.parts)
        match self.start:
            case out.Text():
                return out.Text(text)
            case out.ThinkingOutput():
                return out.ThinkingOutput(text, out.SIGNATURE)
            case out.ToolUseOutput():
                return replace(self.start, input=_input(text))


class MessageProgress:
    """Builds one answer. Iterate over the events of each method in order."""

    def __init__(self, begun: out.AnswerMessage, max_tokens: int) -> None:
        """
        Args:
            begun: the answer without content.
            max_tokens: maximum number of output tokens that the client asked for; the context may hold fewer.
        """
        self.message = begun
        self._max_tokens = max_tokens
        self._blocks: list[out.Content] = []
        self._open: _OpenBlock | None = None

    def add(self, chunk: TextChunk) -> Iterator[out.Event]:
        """Add a chunk of the output; the last one ends the answer."""
        if chunk.reasoning:
            yield from self._enter(out.ThinkingOutput("", ""))
            yield self._delta(chunk.reasoning, out.ThinkingAdded(chunk.reasoning))
        continued, others = chunk.calls_around_text()
        yield from self._calls(continued)
        if chunk.text:
            yield from self._enter(out.Text(""))
            yield self._delta(chunk.text, out.TextAdded(chunk.text))
        yield from self._calls(others)
        if chunk.finish_reason is not None:
            yield from self._close()
            yield from self._finish(chunk)

    def _calls(self, deltas: Sequence[CallDelta]) -> Iterator[out.Event]:
        for call in deltas:
            if call.name:
                yield from self._close()
                yield from self._enter(out.ToolUseOutput(call.call_id, call.name, {}))
            if call.arguments:
                yield self._delta(call.arguments, out.InputAdded(call.arguments))

    def _enter(self, start: out.Content) -> Iterator[out.Event]:
        """Open a block, unless one of its type is open."""
        if self._open is not None and type(self._open.start) is type(start):
            return
        yield from self._close()
        self._open = _OpenBlock(start)
        yield out.BlockStart(len(self._blocks), start)

    def _delta(self, text: str, delta: out.Delta) -> out.Event:
        assert self._open is not None, "the block was opened before"
        self._open.parts.append(text)
        return out.BlockDelta(len(self._blocks), delta)

    def _close(self) -> Iterator[out.Event]:
        if self._open is None:
            return
        if isinstance(self._open.start, out.ThinkingOutput):
            yield out.BlockDelta(len(self._blocks), out.SignatureAdded(out.SIGNATURE))
        yield out.BlockStop(len(self._blocks))
        self._blocks.append(self._open.whole())
        self._open = None

    def _finish(self, chunk: TextChunk) -> Iterator[out.Event]:
        assert chunk.usage is not None, "the last chunk has the usage"
        reason, stop = self._reason(chunk, chunk.usage), chunk.stop_reason
        end = out.MessageEnd(reason, stop if isinstance(stop, str) else None)
        usage = usage_of(chunk.usage)
        self.message = replace(
            self.message,
            content=self._blocks,
            usage=usage,
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
        )
        event = out.MessageDelta(end, usage)
        if chunk.timing is not None:
            self.message.kvferry = event.kvferry = chunk.timing
        yield event
        yield out.MessageStop()

    def _reason(self, chunk: TextChunk, usage: Usage) -> str:
        if chunk.finish_reason is FinishReason.LENGTH:
            return "max_tokens" if usage.output_tokens >= self._max_tokens else "model_context_window_exceeded"
        if chunk.finish_reason is FinishReason.ABORT:
            return "pause_turn"  # clients may send the answer back to continue it
        if isinstance(chunk.stop_reason, str):
            return "stop_sequence"
        has_calls = any(isinstance(block, out.ToolUseOutput) for block in self._blocks)
        return "tool_use" if has_calls else "end_turn"


def usage_of(usage: Usage) -> out.MessageUsage:
    """Convert the token counts of a sample."""
    details = out.OutputDetails(usage.reasoning_tokens)
    num_other = usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens
    return out.MessageUsage(num_other, usage.cached_tokens, usage.cache_write_tokens, usage.output_tokens, details)


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; of arguments that were cut off, the part that is complete."""
    try:
        value = from_json(arguments or "{}", allow_inf_nan=False, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
