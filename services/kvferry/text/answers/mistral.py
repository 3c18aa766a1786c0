"""Calls in Mistral's formats: a list after `[TOOL_CALLS]` or, since 2025, `[TOOL_CALLS]f{...}` for each call.

The newer format may have `[CALL_ID]` with an id, and `[ARGS]`, between the name and the arguments.
"""

from collections.abc import Generator

from kvferry.text.answers.calls import Calls, read_call
from kvferry.text.answers.json_reader import SPACE, read_object, skip_space
from kvferry.text.answers.marks import Marks
from kvferry.text.answers.pieces import NotACall

OPENER = "[TOOL_CALLS]"
_CALL_ID, _ARGS = "[CALL_ID]", "[ARGS]"
_MAX_HEAD = 256
"""Maximum number of characters of a name and of an id."""


class Mistral:
    """Reads calls of Mistral's formats."""

    at_start: tuple[str, ...] = ()

    def __init__(self, marks: Marks) -> None:
        self.openers = (marks.written(OPENER),)
        self._call_id = marks.written(_CALL_ID)
        self._args = marks.written(_ARGS)

    def read(self, _opener: str, calls: Calls) -> Generator[None, str, None]:
        """Read a list of calls, or one call, after `[TOOL_CALLS]`."""
        character = yield from skip_space()
        if character == "[":
            yield from _calls_of_list(calls)
        else:
            yield from self._named(character, calls)

    def _named(self, first: str, calls: Calls) -> Generator[None, str, None]:
        head = first
        while (character := (yield)) != "{":
            head += character
            if len(head) > _MAX_HEAD:
                raise NotACall
        name = head.partition(self._call_id)[0].removesuffix(self._args).strip(SPACE)
        if name not in calls.names:
            raise NotACall
        calls.begin(name)
        yield from read_object(calls.arguments)
        calls.end()


def _calls_of_list(calls: Calls) -> Generator[None, str, None]:
    character = yield from skip_space()
    while True:
        if character != "{":
            raise NotACall
        yield from read_call(calls)
        character = yield from skip_space()
        if character == "]":
            return
        if character != ",":
            raise NotACall
        character = yield from skip_space()
