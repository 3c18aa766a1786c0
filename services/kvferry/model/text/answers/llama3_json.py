"""Calls in the JSON format of Llama 3: `{"name": "f", "parameters": {...}}`, several separated by `;`.

The answer begins with the call, or `<|python_tag|>` stands before it.
"""

from collections.abc import Generator

from kvferry.model.text.answers.calls import Calls, read_call
from kvferry.model.text.answers.json_reader import skip_space
from kvferry.model.text.answers.marks import Marks
from kvferry.model.text.answers.pieces import NotACall

TAG = "<|python_tag|>"
_BRACE = "{"


class Llama3Json:
    """Reads calls of Llama 3's JSON format."""

    at_start = (_BRACE,)

    def __init__(self, marks: Marks) -> None:
        self.openers = (marks.written(TAG),)

    def read(self, opener: str, calls: Calls) -> Generator[None, str, None]:
        """Read calls after the tag, or after the opening brace of the first call."""
        if opener != _BRACE and (yield from skip_space()) != _BRACE:
            raise NotACall
        while True:
            yield from read_call(calls)
            if (yield from skip_space()) != ";" or (yield from skip_space()) != _BRACE:
                raise NotACall
