"""Calls as JSON objects, in the formats of Hermes and Qwen, and of Llama 3.

    <tool_call>{"name": "f", "arguments": {...}}</tool_call>      for each call
    {"name": "f", "parameters": {...}}                            several separated by `;`

In Llama's format the answer begins with the call, or `<|python_tag|>` stands before it.
"""

from collections.abc import Generator

from kvferry.text.answers.calls import Calls, read_call
from kvferry.text.answers.json_reader import skip_space
from kvferry.text.answers.marks import Marks
from kvferry.text.answers.pieces import NotACall

OPENER, CLOSER = "<tool_call>", "</tool_call>"
LLAMA3_TAG = "<|python_tag|>"
_BRACE = "{"


class Hermes:
    """Reads calls of the Hermes format."""

    at_start: tuple[str, ...] = ()

    def __init__(self, marks: Marks) -> None:
        self.openers = (marks.written(OPENER),)
        self._closer = marks.written(CLOSER)

    def read(self, _opener: str, calls: Calls) -> Generator[None, str, None]:
        """Read a call after `<tool_call>`, and its closing tag.

        Raises:
            NotACall: the text is not a call of this format.
        """
        if (yield from skip_space()) != _BRACE:
            raise NotACall
        yield from read_call(calls)
        character = yield from skip_space()
        for position, expected in enumerate(self._closer):
            if (character if position == 0 else (yield)) != expected:
                raise NotACall


class Llama3Json:
    """Reads calls of Llama 3's JSON format."""

    at_start = (_BRACE,)

    def __init__(self, marks: Marks) -> None:
        self.openers = (marks.written(LLAMA3_TAG),)

    def read(self, opener: str, calls: Calls) -> Generator[None, str, None]:
        """Read calls after the tag, or after the opening brace of the first call.

        Raises:
            NotACall: the text is not a call of this format.
        """
        if opener != _BRACE and (yield from skip_space()) != _BRACE:
            raise NotACall
        while True:
            yield from read_call(calls)
            if (yield from skip_space()) != ";" or (yield from skip_space()) != _BRACE:
                raise NotACall
