"""Splitter of an answer into reasoning, content and tool calls, its options, and the format of a model's answers."""

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvferry.text.answers.call_parser import CallParser
from kvferry.text.answers.calls import Calls
from kvferry.text.answers.harmony import HarmonySplitter
from kvferry.text.answers.marks import Marks, without_marks
from kvferry.text.answers.pieces import AnswerParts
from kvferry.text.answers.reasoning import ReasoningSplitter
from kvferry.text.answers.registry import CallFormat, new_id_of, syntax_of

_LETTERS = string.ascii_letters + string.digits


def random_letters(count: int) -> str:
    """Return `count` random letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(count))


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The format of a model's answers."""

    call_format: CallFormat = CallFormat.HERMES
    has_reasoning: bool = False
    """Whether answers may begin with reasoning."""
    marks: Marks = field(default_factory=Marks)


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """Options for splitting the answers of one request."""

    tool_names: tuple[str, ...] = ()
    """Names of the tools that may be called; if empty, calls are not searched for."""
    max_calls: int | None = None
    """Number of calls to report; further ones are dropped. `None` for no limit."""
    is_reasoning_open: bool = False
    """Whether the prompt has opened the reasoning."""
    has_only_calls: bool = False
    """Whether the answer has nothing but calls after the reasoning: text is then a part of a call that was cut off, and
    is dropped."""
    stops_in_reasoning: bool = False
    """Whether stop strings end the reasoning too, and with it the answer."""
    schemas: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Schemas of the tools' arguments, by the name of the tool."""


class AnswerSplitter:
    """Splits the answer of one sample."""

    def __init__(self, form: AnswerForm, split: SplitOptions, letters: Callable[[int], str] = random_letters) -> None:
        """
        Args:
            form: format of the model's answers.
            split: options for splitting.
            letters: function that returns random letters and digits for the ids of calls.
        """
        self._has_only_calls = split.has_only_calls
        self._stops_in_reasoning = split.stops_in_reasoning
        self._whole: HarmonySplitter | None = None
        self._reasoning: ReasoningSplitter | None = None
        self._calls: CallParser | None = None
        if form.call_format is CallFormat.HARMONY:
            new_id = new_id_of(form.call_format, letters)
            self._whole = HarmonySplitter(form.marks, Calls(frozenset(split.tool_names), new_id, split.max_calls))
            return
        if form.has_reasoning:
            self._reasoning = ReasoningSplitter(form.marks, is_open=split.is_reasoning_open)
        if split.tool_names:
            new_id = new_id_of(form.call_format, letters)
            calls = Calls(frozenset(split.tool_names), new_id, split.max_calls, split.schemas)
            self._calls = CallParser(syntax_of(form.call_format, form.marks), calls)

    @property
    def is_complete(self) -> bool:
        """Whether all calls to report have ended, so that the text after them is not needed."""
        parser = self._whole or self._calls
        return parser is not None and parser.is_complete

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside reasoning."""
        parser = self._whole or self._reasoning
        return parser is not None and parser.is_reasoning

    @property
    def may_reason(self) -> bool:
        """Whether text that follows may be reasoning."""
        return self._whole is not None or (self._reasoning is not None and self._reasoning.may_reason)

    def may_stop(self, text: str) -> bool:
        """Return whether a stop string may end in `text`, which comes next. Stop strings end the answer's text, not a
        call, whose arguments would be cut, and the reasoning only by option."""
        parser = self._whole or self._reasoning
        if self._calls is not None and self._calls.is_reading:
            return False
        return parser is None or parser.may_stop(text) or (self._stops_in_reasoning and parser.is_reasoning)

    @property
    def may_exempt(self) -> bool:
        """Whether stop strings may not apply to text that follows."""
        return self.may_reason or self._calls is not None

    def feed(self, text: str) -> AnswerParts:
        """Add text and return the parts that it completes."""
        return self._shown(self._feed(text))

    def finish(self) -> AnswerParts:
        """End the text and return what was held back."""
        return self._shown(self._finish())

    def _shown(self, parts: AnswerParts) -> AnswerParts:
        return AnswerParts("", parts.reasoning, parts.calls) if self._has_only_calls else parts

    def _feed(self, text: str) -> AnswerParts:
        if self._whole is not None:
            return self._whole.feed(text)
        outer = AnswerParts(text) if self._reasoning is None else self._reasoning.feed(text)
        if self._calls is None:
            return AnswerParts(without_marks(outer.content), outer.reasoning)
        inner = self._calls.feed(outer.content)
        return AnswerParts(inner.content, outer.reasoning, inner.calls)

    def _finish(self) -> AnswerParts:
        if self._whole is not None:
            return self._whole.finish()
        outer = AnswerParts() if self._reasoning is None else self._reasoning.finish()
        if self._calls is None:
            return AnswerParts(without_marks(outer.content), outer.reasoning)
        fed, last = self._calls.feed(outer.content), self._calls.finish()
        return AnswerParts(fed.content + last.content, outer.reasoning, fed.calls + last.calls)
