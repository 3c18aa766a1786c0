"""Splits the reasoning at the start of an answer, `<think>...</think>`, from what follows it.

Whitespace around the reasoning is dropped. If the chat template opened `<think>` in the prompt, the answer begins
inside the reasoning.
"""

from enum import Enum, auto

from kvferry.text.answers.marker_search import MarkerSearch
from kvferry.text.answers.marks import Marks, without_marks
from kvferry.text.answers.pieces import AnswerParts

OPENER, CLOSER = "<think>", "</think>"


class _State(Enum):
    START = auto()
    """Only whitespace and a prefix of the opener so far."""
    REASONING = auto()
    BEFORE_CONTENT = auto()
    """Whitespace after the reasoning."""
    CONTENT = auto()


class ReasoningSplitter:
    """Splits one answer."""

    def __init__(self, marks: Marks, *, is_open: bool = False) -> None:
        """
        Args:
            marks: marks of the model's markers.
            is_open: whether the prompt has opened the reasoning.
        """
        self._opener = marks.written(OPENER)
        self._is_open = is_open
        self._state = _State.START
        self._held = ""
        self._search = MarkerSearch((marks.written(CLOSER),))
        self._is_blank = True
        """Whether the reasoning so far is empty."""

    @property
    def may_reason(self) -> bool:
        """Whether the content has not begun: the text so far may be the start of the reasoning, is inside it, or is
        followed by whitespace."""
        return self._state is not _State.CONTENT

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._state is _State.REASONING or (self._state is _State.START and self._is_open)

    def may_stop(self, text: str) -> bool:
        """Return whether a stop string may end in `text`, which comes next: not in the reasoning, nor in the whitespace
        after it."""
        return not self.is_reasoning and (self._state is not _State.BEFORE_CONTENT or bool(text.strip()))

    def feed(self, text: str) -> AnswerParts:
        """Add text and return the reasoning and the content that it completes. Content keeps its marks."""
        if self._state is _State.CONTENT:
            return AnswerParts(text)
        if self._state is _State.START:
            self._held += text
            bare = self._held.lstrip()
            if len(bare) < len(self._opener) and self._opener.startswith(bare):
                return AnswerParts()
            return self._begin(bare)
        if self._state is _State.REASONING:
            return self._reason(text)
        return self._continue(text)

    def finish(self) -> AnswerParts:
        """End the text and return what was held back."""
        if self._state is _State.START:
            held, self._held = self._held, ""
            return AnswerParts(reasoning=without_marks(held.strip())) if self._is_open else AnswerParts(held)
        if self._state is _State.REASONING:
            return AnswerParts(reasoning=without_marks(self._search.finish().rstrip()))
        return AnswerParts()

    def _begin(self, bare: str) -> AnswerParts:
        held, self._held = self._held, ""
        if bare.startswith(self._opener):
            bare = bare[len(self._opener) :]
        elif not self._is_open:
            self._state = _State.CONTENT
            return AnswerParts(held)
        self._state = _State.REASONING
        return self._reason(bare)

    def _reason(self, text: str) -> AnswerParts:
        if self._is_blank:
            text = text.lstrip()
        found = self._search.feed(text)
        self._is_blank = self._is_blank and not text
        reasoning = without_marks(found.clear)
        if found.marker is None:
            return AnswerParts(reasoning=reasoning)
        self._state = _State.BEFORE_CONTENT
        return AnswerParts(self._continue(found.rest).content, reasoning)

    def _continue(self, text: str) -> AnswerParts:
        text = text.lstrip()
        if text:
            self._state = _State.CONTENT
        return AnswerParts(text)
