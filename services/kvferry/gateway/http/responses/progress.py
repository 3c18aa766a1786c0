"""The progress of one response: text chunks in, events out, and the response so far. No I/O.

reasoning ──► message ──► function calls        each item is added, receives its deltas, and is done
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET
from msgspec.structs import replace

from kvferry.core.errors import KvferryError
from kvferry.core.inference.chunks import TextChunk
from kvferry.core.inference.tool_calls import CallDelta
from kvferry.core.sampling import FinishReason
from kvferry.gateway.http.fields.custom_tools import input_of
from kvferry.gateway.http.openai import reply
from kvferry.gateway.http.responses import output as out

Seal = Callable[[str], str]
_ANSWERS = out.OutputMessage | out.OutputCall | out.OutputCustomCall
_FAILURES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}


@dataclass(slots=True)
class _OpenItem:
    """The item that is being written."""

    kind: str
    """`message`, `reasoning`, `function_call` or `custom_tool_call`."""
    id: str
    parts: list[str] = field(default_factory=list)
    logprobs: list[reply.TokenLogprob] = field(default_factory=list)
    call_id: str = ""
    name: str = ""

    def item(self, status: out.Status, seal: Seal | None = None, *, is_empty: bool = False) -> out.OutputItem:
        text = "" if is_empty else "".join(self.parts)
        if self.kind == "custom_tool_call":
            return out.OutputCustomCall(self.id, status, self.call_id, self.name, input_of(text))
        if self.kind == "function_call":
            return out.OutputCall(self.id, status, self.call_id, self.name, text)
        if self.kind == "reasoning":
            carrier = UNSET if is_empty or seal is None else seal(text)
            content = [] if is_empty else [out.ReasoningPart(text)]
            return out.OutputReasoning(self.id, status, content, encrypted_content=carrier)
        parts = [] if is_empty else [out.OutputTextPart(text, [], self.logprobs)]
        return out.OutputMessage(self.id, status, parts)


class ResponseProgress:
    """Builds one response. Iterate over the events of each method in order."""

    def __init__(
        self,
        begun: out.Response,
        spell: reply.TokenBytes,
        seal: Seal | None = None,
        custom: frozenset[str] = frozenset(),
    ) -> None:
        """
        Args:
            begun: the response without output, in progress.
            spell: returns the bytes of a token.
            seal: returns the carrier of a reasoning; `None` for items without carriers.
            custom: names of the custom tools.
        """
        self._custom = custom
        self.response = begun
        self._seal = seal
        self._spell = spell
        self._items: list[out.OutputItem] = []
        self._open: _OpenItem | None = None
        self._number = 0
        self._suffix = begun.id.partition("_")[2]

    def queue(self) -> list[out.Event]:
        """Return the first events of a response in the background, which waits to begin."""
        self.response = replace(self.response, status="queued")
        return [out.ResponseCreated(self._next(), self.response), out.ResponseQueued(self._next(), self.response)]

    def begin(self) -> list[out.Event]:
        """Return the events with which the output begins."""
        self.response = replace(self.response, status="in_progress")
        created = [] if self._number else [out.ResponseCreated(self._next(), self.response)]
        return [*created, out.ResponseInProgress(self._next(), self.response)]

    def so_far(self) -> out.Response:
        """Return the response with the output so far."""
        return self.response if self.response.output else replace(self.response, output=self._output("in_progress"))

    def add(self, chunk: TextChunk) -> Iterator[out.Event]:
        """Add a chunk of the output; the last one ends the response."""
        if chunk.reasoning:
            yield from self._enter("reasoning", "rs")
            yield self._delta(chunk.reasoning)
        continued, others = chunk.calls_around_text()
        for call in continued:
            yield from self._call(call)
        logprobs = reply.chat_logprobs(chunk.tokens, self._spell) if chunk.text else None
        if chunk.text:
            yield from self._enter("message", "msg")
            yield self._delta(chunk.text, [] if logprobs is None else logprobs.content)
        for call in others:
            yield from self._call(call)
        if chunk.finish_reason is not None:
            yield from self._finish(chunk)

    def fail(self, error: KvferryError, now: float) -> out.Event:
        """End a response that failed after its first event.

        Args:
            error: the failure.
            now: wall-clock seconds since the epoch.
        """
        self.response = replace(
            self.response,
            status="failed",
            completed_at=now,
            output=self._output("incomplete"),
            error=out.ResponseFailure(_FAILURES.get(error.http_status, "server_error"), error.message),
        )
        return out.ResponseFailed(self._next(), self.response)

    def cancel(self, now: float) -> out.Event:
        """End a response that is cancelled. OpenAI has no event for it: clients end at `response.incomplete`.

        Args:
            now: wall-clock seconds since the epoch.
        """
        self.response = replace(self.response, status="cancelled", completed_at=now, output=self._output("incomplete"))
        return out.ResponseIncomplete(self._next(), self.response)

    # -- items -----------------------------------------------------------------------------------------------------

    def _enter(self, kind: str, prefix: str) -> Iterator[out.Event]:
        """Open a message or reasoning, unless one is open."""
        if self._open is not None and self._open.kind == kind:
            return
        yield from self._close("completed")
        opened = self._open = _OpenItem(kind, self._named(prefix))
        yield out.ItemAdded(self._next(), self._index, opened.item("in_progress", is_empty=True))
        part: out.Part = out.ReasoningPart("") if kind == "reasoning" else out.OutputTextPart("")
        yield out.PartAdded(self._next(), opened.id, self._index, 0, part)

    def _call(self, call: CallDelta) -> Iterator[out.Event]:
        if call.name:
            yield from self._close("completed")
            kind, prefix = ("custom_tool_call", "ctc") if call.name in self._custom else ("function_call", "fc")
            opened = self._open = _OpenItem(kind, self._named(prefix), call_id=call.call_id, name=call.name)
            yield out.ItemAdded(self._next(), self._index, opened.item("in_progress"))
        if call.arguments:
            assert self._open is not None, "a call's first delta has its name"
            self._open.parts.append(call.arguments)
            if self._open.kind == "custom_tool_call":
                return  # its input is sent as a whole, when the JSON text of the arguments is complete
            yield out.ArgumentsDelta(self._next(), self._open.id, self._index, call.arguments)

    def _delta(self, text: str, logprobs: Sequence[reply.TokenLogprob] = ()) -> out.Event:
        assert self._open is not None, "the item was opened before"
        self._open.parts.append(text)
        if self._open.kind == "reasoning":
            return out.ReasoningDelta(self._next(), self._open.id, self._index, 0, text)
        self._open.logprobs += logprobs
        return out.TextDelta(self._next(), self._open.id, self._index, 0, text, list(logprobs))

    def _close(self, status: out.Status) -> Iterator[out.Event]:
        done = self._open
        if done is None:
            return
        text, index = "".join(done.parts), self._index
        if done.kind == "custom_tool_call":
            yield out.CustomInputDelta(self._next(), done.id, index, input_of(text))
            yield out.CustomInputDone(self._next(), done.id, index, input_of(text))
        elif done.kind == "function_call":
            yield out.ArgumentsDone(self._next(), done.id, index, done.name, text)
        elif done.kind == "reasoning":
            yield out.ReasoningDone(self._next(), done.id, index, 0, text)
            yield out.PartDone(self._next(), done.id, index, 0, out.ReasoningPart(text))
        else:
            yield out.TextDone(self._next(), done.id, index, 0, text, done.logprobs)
            yield out.PartDone(self._next(), done.id, index, 0, out.OutputTextPart(text, [], done.logprobs))
        item = done.item(status, self._seal)
        self._open = None
        yield out.ItemDone(self._next(), index, item)
        self._items.append(item)

    def _finish(self, chunk: TextChunk) -> Iterator[out.Event]:
        is_cut = chunk.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
        why = "max_output_tokens" if chunk.finish_reason is FinishReason.LENGTH else "generation_paused"
        if self._open is None and not any(isinstance(item, _ANSWERS) for item in self._items):
            yield from self._enter("message", "msg")  # an empty answer is a message without text
        yield from self._close("incomplete" if is_cut else "completed")
        ended = replace(
            self.response,
            status="incomplete" if is_cut else "completed",
            output=list(self._items),
            usage=None if chunk.usage is None else out.ResponseUsage.of(chunk.usage),
            incomplete_details=out.IncompleteDetails(why) if is_cut else None,
        )
        if chunk.timing is not None:
            ended.kvferry = chunk.timing
            ended.completed_at = self.response.created_at + int(chunk.timing.total_seconds)
        self.response = ended
        kind = out.ResponseIncomplete if is_cut else out.ResponseCompleted
        yield kind(self._next(), ended)

    # -- numbers ---------------------------------------------------------------------------------------------------

    def _named(self, prefix: str) -> str:
        """Return the id of the next item."""
        return f"{prefix}_{self._suffix}_{self._index}"

    @property
    def _index(self) -> int:
        return len(self._items)

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def _output(self, status: out.Status) -> list[out.OutputItem]:
        return [*self._items, *([] if self._open is None else [self._open.item(status, self._seal)])]
