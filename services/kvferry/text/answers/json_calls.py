"""Calls as JSON objects, in the formats of several model families.

    <tool_call>{"name": "f", "arguments": {...}}</tool_call>      Hermes, Qwen: for each call
    {"name": "f", "parameters": {...}}                            Llama 3: several separated by `;`
    [TOOL_CALLS][{"name": "f", "arguments": {...}}]               Mistral: a list
    [TOOL_CALLS]f{...}                                            Mistral, since 2025: for each call
    <|tool_call|>[{"name": "f", "arguments": {...}}]              Granite; Phi-4 ends it with <|/tool_call|>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...<｜tool▁calls▁end｜>

The last one is DeepSeek's since V3.1. Before, in V3 and R1, each call has its type, and its arguments are a code block:

    <｜tool▁call▁begin｜>function<｜tool▁sep｜>f
    ```json
    {...}
    ```<｜tool▁call▁end｜>

In Llama's format the answer begins with the call, or `<|python_tag|>` stands before it. Mistral's newer format may have
`[CALL_ID]` with an id, and `[ARGS]`, between the name and the arguments.
"""

from collections.abc import Generator

from kvferry.text.answers.calls import Calls, read_call
from kvferry.text.answers.json_reader import SPACE, read_object, read_one_of, skip_space
from kvferry.text.answers.marks import Marks
from kvferry.text.answers.pieces import NotACall

OPENER, CLOSER = "<tool_call>", "</tool_call>"
LLAMA3_TAG = "<|python_tag|>"
MISTRAL_TAG = "[TOOL_CALLS]"
_CALL_ID, _ARGS = "[CALL_ID]", "[ARGS]"
_MAX_HEAD = 256
"""Maximum number of characters of a name and of an id."""
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE, FENCE_END = "```json", "```"
LIST_OPENER, LIST_CLOSER = "<|tool_call|>", "<|/tool_call|>"
_FUNCTOOLS = "functools["
"""What Phi-4-mini may write before the first call."""
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


class Mistral:
    """Reads calls of Mistral's formats."""

    at_start: tuple[str, ...] = ()

    def __init__(self, marks: Marks) -> None:
        self.openers = (marks.written(MISTRAL_TAG),)
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


class Granite:
    """Reads calls of Granite's format, and one call without a list."""

    at_start: tuple[str, ...] = ()

    def __init__(self, marks: Marks) -> None:
        self.openers: tuple[str, ...] = (marks.written(LIST_OPENER), marks.written(OPENER))
        self._closers = (marks.written(LIST_CLOSER), marks.written(CLOSER))

    def read(self, opener: str, calls: Calls) -> Generator[None, str, None]:
        """Read a list of calls after the opener, and the closing tag if there is one.

        Raises:
            NotACall: the text is not a call of this format.
        """
        character = "[" if opener == _FUNCTOOLS else (yield from skip_space())
        if character == "[":
            yield from _calls_of_list(calls)
        elif character == _BRACE:
            yield from read_call(calls)
        else:
            raise NotACall
        calls.accept()
        yield from read_one_of(self._closers, (yield from skip_space()))


class Phi4(Granite):
    """Reads calls of the format of Phi-4-mini."""

    def __init__(self, marks: Marks) -> None:
        super().__init__(marks)
        self.openers = (marks.written(LIST_OPENER), _FUNCTOOLS)


class DeepSeek:
    """Reads calls of both formats of DeepSeek. The tag before the first call may be missing."""

    at_start: tuple[str, ...] = ()

    def __init__(self, marks: Marks) -> None:
        self._call, self._call_end = marks.written(CALL), marks.written(CALL_END)
        self._separator, self._end = marks.written(SEPARATOR), marks.written(CALLS_END)
        self.openers = (marks.written(CALLS), self._call)

    def read(self, opener: str, calls: Calls) -> Generator[None, str, None]:
        """Read calls up to the tag after the last one.

        Raises:
            NotACall: the text is not a call of these formats.
        """
        if opener != self._call:
            yield from read_one_of((self._call,), (yield from skip_space()))
        while True:
            yield from self._read_call(calls)
            character = yield from skip_space()
            if (yield from read_one_of((self._call, self._end), character)) == self._end:
                return

    def _read_call(self, calls: Calls) -> Generator[None, str, None]:
        name = yield from _up_to(self._separator)
        character = yield from skip_space()
        has_fence = character != "{"
        if has_fence:
            name = character + (yield from _up_to("\n"))
            yield from read_one_of((FENCE,), (yield from skip_space()))
            character = yield from skip_space()
        name = name.strip(SPACE)
        if character != "{" or name not in calls.names:
            raise NotACall
        calls.begin(name)
        yield from read_object(calls.arguments)
        calls.end()
        character = yield from skip_space()
        if has_fence:
            yield from read_one_of((FENCE_END,), character)
            character = yield from skip_space()
        yield from read_one_of((self._call_end,), character)
        calls.accept()


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


def _up_to(end: str) -> Generator[None, str, str]:
    """Read text up to `end`, and return it."""
    text = ""
    while not text.endswith(end):
        text += yield
        if len(text) > _MAX_HEAD:
            raise NotACall
    return text.removesuffix(end)
