"""Splits answers in the harmony format of gpt-oss, which are messages in channels (OpenAI, gpt-oss model card, 2025,
section 2.5.2). Examples of reasoning, a call of the tool f, and content:

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

The prompt ends with the first `<|start|>assistant`. Text in other channels, calls of tools that are not offered, and
text without markers, such as a constrained answer, are content.
"""

from collections.abc import Generator
from enum import Enum, auto

from kvferry.text.answers.calls import Calls
from kvferry.text.answers.json_reader import read_object, skip_space
from kvferry.text.answers.marker_search import MarkerSearch
from kvferry.text.answers.marks import HARMONY, Marks, without_marks
from kvferry.text.answers.pieces import AnswerParts, NotACall

CHANNEL = HARMONY[0]
_RECIPIENT, _FUNCTIONS = "to=", "functions."
_MAX_HEADER = 1024
"""Maximum number of characters of a header; longer text is content."""


class _State(Enum):
    BEFORE = auto()
    """Before the first marker: the start of a header, or of text without markers."""
    HEADER = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    DROPPED = auto()
    """Text after the arguments of a call, which is dropped."""
    BETWEEN = auto()
    """After a message."""


class HarmonySplitter:
    """Splits one answer."""

    def __init__(self, marks: Marks, calls: Calls) -> None:
        self._calls = calls
        written = {marks.written(marker): marker for marker in HARMONY}
        self._markers = written
        self._search = MarkerSearch(tuple(written))
        self._state = _State.BEFORE
        self._header = ""
        self._channel_at = 0
        """Position in the header at which the text of the channel begins."""
        self._name = ""
        self._has_begun = False
        """Whether the arguments of the call have begun."""
        self._reading: Generator[None, str, None] | None = None
        self._said: dict[_State, bool] = {}
        """Whether earlier messages had reasoning, and whether they had content."""
        self._content: list[str] = []
        self._reasoning: list[str] = []

    @property
    def is_complete(self) -> bool:
        """Whether all calls to report have ended."""
        return self._calls.is_complete

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside a message of reasoning."""
        return self._state is _State.REASONING

    def may_stop(self, _text: str) -> bool:
        """Return whether a stop string may end in the text that comes next: not in reasoning, calls or headers."""
        return self._state not in (_State.REASONING, _State.CALL, _State.HEADER, _State.BETWEEN)

    def feed(self, text: str) -> AnswerParts:
        """Add text and return the parts that it completes."""
        while True:
            found = self._search.feed(text)
            self._add(found.clear)
            if found.marker is None:
                return self._take()
            self._mark(self._markers[found.marker], found.space)
            text = found.rest

    def finish(self) -> AnswerParts:
        """End the text and return what was held back."""
        self._add(self._search.finish())
        if self._state is _State.BEFORE:
            self._content.append(self._header)
        self._end()
        return self._take()

    def _take(self) -> AnswerParts:
        content, reasoning = (without_marks("".join(parts)) for parts in (self._content, self._reasoning))
        self._content, self._reasoning = [], []
        return AnswerParts(content, reasoning, self._calls.take())

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._state is _State.BEFORE:
            self._header += text
            bare = self._header.lstrip()
            begins = bare.startswith(_RECIPIENT) or _RECIPIENT.startswith(bare)
            if not begins or len(self._header) > _MAX_HEADER:
                self._open(_State.CONTENT)
                self._content.append(self._header)
                self._header = ""
        elif self._state is _State.HEADER:
            self._header = (self._header + text)[:_MAX_HEADER]
        elif self._state is _State.REASONING:
            self._reasoning.append(text)
        elif self._state is _State.CALL:
            self._read(text)
        elif self._state is not _State.DROPPED:
            if self._state is _State.BETWEEN:
                self._open(_State.CONTENT)
            self._content.append(text)

    def _mark(self, marker: str, space: str) -> None:
        kind = HARMONY.index(marker)
        if kind == _CHANNEL:
            if self._state not in (_State.BEFORE, _State.HEADER):
                self._end()
                self._header = ""
            self._state = _State.HEADER
            self._header += " "
            self._channel_at = len(self._header)
        elif kind == _START:
            if self._state is _State.BEFORE:
                self._content.append(self._header)
            self._end()
            self._state, self._header, self._channel_at = _State.HEADER, "", 0
        elif kind == _CONSTRAIN:
            self._add(" ")
        elif kind == _MESSAGE:
            if self._state in (_State.BEFORE, _State.HEADER):
                self._begin()
        else:  # the end of a message
            if self._state is _State.BEFORE:
                self._content.append(self._header + space)
            self._end()
            self._header = ""

    def _begin(self) -> None:
        """Begin the body of a message."""
        words = self._header.split()
        channel = next(iter(self._header[self._channel_at :].split()), "")
        recipient = next((word.removeprefix(_RECIPIENT) for word in words if word.startswith(_RECIPIENT)), "")
        self._header = ""
        name = recipient.removeprefix(_FUNCTIONS)
        if recipient.startswith(_FUNCTIONS) and name in self._calls.names:
            self._state, self._name, self._has_begun = _State.CALL, name, False
            self._reading = self._arguments()
            next(self._reading)
        else:
            self._open(_State.REASONING if channel == "analysis" else _State.CONTENT)

    def _open(self, state: _State) -> None:
        """Begin reasoning or content; a line end separates it from that of an earlier message."""
        self._state = state
        if self._said.get(state):
            (self._content if state is _State.CONTENT else self._reasoning).append("\n")
        self._said[state] = True

    def _arguments(self) -> Generator[None, str, None]:
        if (yield from skip_space()) != "{":
            raise NotACall
        self._calls.begin(self._name)
        self._has_begun = True
        yield from read_object(self._calls.arguments)

    def _read(self, text: str) -> None:
        assert self._reading is not None
        for position, character in enumerate(text):
            try:
                self._reading.send(character)
            except StopIteration:
                self._calls.end()
                self._state = _State.DROPPED
                return
            except NotACall:
                self._calls.end()
                self._open(_State.CONTENT)
                self._content.append(text[position:])
                return

    def _end(self) -> None:
        """End the message. A call without arguments has an empty object."""
        if self._state is _State.CALL and not self._has_begun:
            try:
                self._calls.begin(self._name)
                self._calls.arguments("{}")
            except NotACall:  # too many calls
                pass
        if self._state is _State.CALL:
            self._calls.end()
        self._state = _State.BETWEEN


_CHANNEL, _MESSAGE, _CONSTRAIN, _START = range(4)
