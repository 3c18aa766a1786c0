"""Splits generated text into content and tool calls, for any format in `registry.py`.

    content ──opener──► call ──end of the format──► content
                          └──a character that cannot continue the call──► content, from that character on

Text read since the opener, or since the last call, becomes content again if it turns out not to be a call. When a
call's arguments are malformed after they began to stream, the call ends there and the rest is content. Whitespace next
to a call is dropped, except between content before and after it. Each character is read at most twice, and no
answer causes an error.
"""

from collections.abc import Generator
from typing import Protocol

from kvferry.text.answers.calls import Calls
from kvferry.text.answers.marker_search import MarkerSearch
from kvferry.text.answers.marks import is_mark, without_marks
from kvferry.text.answers.pieces import AnswerParts, NotACall

MAX_HELD_CHARS = 1 << 16
"""Maximum number of characters that are held back until they are recognized as a call or not."""

_BLOCK = 1024
"""Characters that are parsed at a time."""


class CallSyntax(Protocol):
    """A format of tool calls."""

    @property
    def openers(self) -> tuple[str, ...]:
        """Strings that may begin calls at any position of the answer."""
        ...

    @property
    def at_start(self) -> tuple[str, ...]:
        """Characters that may begin calls if they begin the answer."""
        ...

    def read(self, opener: str, calls: Calls) -> Generator[None, str, object]:
        """Return a generator that receives the characters after `opener` and reports the calls; it returns after the
        last character of the format, and raises NotACall at a character that the format does not allow.

        Args:
            opener: the marker that was read.
            calls: receives the calls.
        """
        ...


class CallParser:
    """Parses one answer."""

    def __init__(self, syntax: CallSyntax, calls: Calls) -> None:
        self._syntax = syntax
        self._calls = calls
        self._search = MarkerSearch(syntax.openers, at_start=syntax.at_start)
        self._reading: Generator[None, str, object] | None = None
        self._held: list[str] = []
        """Text since the opener or the last call, if no call is open."""
        self._num_held = 0
        self._drops_space = False
        """Whether content begins only at the next non-whitespace character."""
        self._has_content = False
        self._before = ""
        """Whitespace before the opener."""
        self._between = ""
        """Whitespace between the content so far and content after calls."""

    @property
    def is_complete(self) -> bool:
        """Whether all calls to report have ended."""
        return self._calls.is_complete

    @property
    def is_reading(self) -> bool:
        """Whether the text so far ends inside a call, or inside what may become one."""
        return self._reading is not None

    def feed(self, text: str) -> AnswerParts:
        """Add text; return the content that is certain by now and the new parts of calls."""
        content: list[str] = []
        for start in range(0, len(text), _BLOCK):  # each opener copies the text after it
            block = text[start : start + _BLOCK]
            while block:
                block = self._read_call(block, content) if self._reading is not None else self._find(block, content)
        return AnswerParts("".join(content), calls=self._calls.take())

    def finish(self) -> AnswerParts:
        """End the text and return what was held back."""
        content: list[str] = []
        if self._reading is not None:
            self._give_up(content)
        self._add(self._search.finish(), content)
        return AnswerParts("".join(content), calls=self._calls.take())

    def _find(self, text: str, content: list[str]) -> str:
        """Search for the next call and return the text after its opener."""
        if self._drops_space and not self._search.holds_text:
            text = self._without_lead(text)
        found = self._search.feed(text)
        self._add(found.clear, content)
        if found.marker is None:
            return ""
        self._search.is_blank = False
        self._reading = self._syntax.read(found.marker, self._calls)
        next(self._reading)  # run to the first `yield`
        self._before = found.space
        self._hold(found.space + found.marker)
        return found.rest

    def _without_lead(self, text: str) -> str:
        """Remove whitespace, and control tokens that open no call, from the beginning of a text."""
        openers = self._syntax.openers
        for position, character in enumerate(text):
            if not character.isspace() and (character in openers or not is_mark(character)):
                return text[position:]
        return ""

    def _read_call(self, text: str, content: list[str]) -> str:
        """Read a call up to its end and return the text after it."""
        assert self._reading is not None
        for position, character in enumerate(text):
            num_accepted = self._calls.num_accepted
            try:
                if self._num_held > MAX_HELD_CHARS:
                    raise NotACall
                self._reading.send(character)
            except NotACall:
                self._give_up(content)
                return text[position:]
            except StopIteration:
                self._release()
                self._reading = None
                self._drops_space = True
                return text[position + 1 :]
            if self._calls.is_open or self._calls.num_accepted > num_accepted:
                self._release()
                self._drops_space = True
                self._between = self._between or self._before
            else:
                self._hold(character)
        return ""

    def _give_up(self, content: list[str]) -> None:
        """Return to content. A call that has begun ends here."""
        self._reading = None
        self._calls.end()
        self._add("".join(self._held), content)
        self._release()

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._num_held += len(text)

    def _release(self) -> None:
        self._held, self._num_held = [], 0

    def _add(self, text: str, content: list[str]) -> None:
        text = without_marks(text)
        if self._drops_space:
            text = text.lstrip()
            text = self._between + text if text and self._has_content else text
        if text:
            self._drops_space, self._has_content, self._between = False, True, ""
            content.append(text)
