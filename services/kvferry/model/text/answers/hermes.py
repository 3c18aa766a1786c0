"""Calls in the format of Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>` for each call."""

from collections.abc import Generator

from kvferry.model.text.answers.calls import Calls, read_call
from kvferry.model.text.answers.json_reader import skip_space
from kvferry.model.text.answers.marks import Marks
from kvferry.model.text.answers.pieces import NotACall

OPENER, CLOSER = "<tool_call>", "</tool_call>"


class Hermes:
    """Reads calls of the Hermes format."""

    at_start: tuple[str, ...] = ()

    def __init__(self, marks: Marks) -> None:
        self.openers = (marks.written(OPENER),)
        self._closer = marks.written(CLOSER)

    def read(self, _opener: str, calls: Calls) -> Generator[None, str, None]:
        """Read a call after `<tool_call>`, and its closing tag."""
        if (yield from skip_space()) != "{":
            raise NotACall
        yield from read_call(calls)
        character = yield from skip_space()
        for position, expected in enumerate(self._closer):
            if (character if position == 0 else (yield)) != expected:
                raise NotACall
