"""Calls in the format of FunctionGemma: an object without quotes around its keys, and strings between `<escape>`.

    <start_function_call>call:f{city:<escape>Oslo<escape>,days:3}<end_function_call>

Everything between two `<escape>` is the string; nothing in it is escaped. Source: "FunctionGemma formatting and best
practices", Google AI for Developers.
"""

import json
from collections.abc import Callable, Generator

from kvferry.text.answers.calls import Calls
from kvferry.text.answers.json_reader import (
    MAX_DEPTH,
    MAX_SHORT_STRING,
    Out,
    Reader,
    read_number,
    read_one_of,
    read_word,
    skip_space,
)
from kvferry.text.answers.marks import Marks, is_mark
from kvferry.text.answers.pieces import NotACall

OPENER, CLOSER = "<start_function_call>", "<end_function_call>"
QUOTE = "<escape>"
CALL = "call:"
NOT_IN_KEYS = frozenset(":{}[],\n")
"""Characters that no key has."""
_WORDS = {"t": "true", "f": "false", "n": "null"}
_MAX_KEYS = 1024


class FunctionGemma:
    """Reads one call between its tags."""

    at_start: tuple[str, ...] = ()

    def __init__(self, marks: Marks) -> None:
        self.openers = (marks.written(OPENER),)
        self._closer, self._quote = marks.written(CLOSER), marks.written(QUOTE)

    def read(self, _opener: str, calls: Calls) -> Generator[None, str, None]:
        """Read a call up to the closing tag.

        Raises:
            NotACall: the text is not a call of this format.
        """
        yield from read_one_of((CALL,), (yield from skip_space()))
        name = yield from _up_to("{", (yield), 64)
        if name not in calls.names:
            raise NotACall
        yield from self._members(calls.arguments, 0, begin=lambda: calls.begin(name))
        calls.end()
        yield from read_one_of((self._closer,), (yield from skip_space()))

    def _members(self, out: Out, depth: int, *, begin: Callable[[], None]) -> Generator[None, str, None]:
        """Read the members of an object after its opening brace, and the closing one; emit the object as JSON.

        Args:
            out: receives the JSON text.
            depth: number of values around the object.
            begin: called before anything is emitted, when the first key or the end has been read.
        """
        if depth >= MAX_DEPTH:
            raise NotACall
        keys: set[str] = set()
        character = yield from skip_space()
        while character != "}":
            key = yield from self._key(character)
            if key in keys or len(keys) >= _MAX_KEYS:
                raise NotACall
            if not keys:
                begin()
            out(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            keys.add(key)
            after = yield from self._value((yield from skip_space()), out, depth + 1)
            character = yield from self._after_item("}", after)
        if not keys:
            begin()
        out("}" if keys else "{}")

    def _key(self, first: str) -> Generator[None, str, str]:
        if first != self._quote[0]:
            return (yield from _up_to(":", first, MAX_SHORT_STRING)).rstrip()
        parts: list[str] = []
        yield from self._string(first, parts.append)
        if (yield from skip_space()) != ":":
            raise NotACall
        key: str = json.loads("".join(parts))
        return key

    def _value(self, first: str, out: Out, depth: int) -> Reader:
        if first == self._quote[0]:
            yield from self._string(first, out)
        elif first == "{":
            yield from self._members(out, depth, begin=lambda: None)
        elif first == "[":
            yield from self._items(out, depth)
        elif first in _WORDS:
            yield from read_word(_WORDS[first], out)
        else:
            return (yield from read_number(first, out))
        return ""

    def _items(self, out: Out, depth: int) -> Generator[None, str, None]:
        if depth >= MAX_DEPTH:
            raise NotACall
        out("[")
        is_first = True
        character = yield from skip_space()
        while character != "]":
            if not is_first:
                out(", ")
            is_first = False
            after = yield from self._value(character, out, depth + 1)
            character = yield from self._after_item("]", after)
        out("]")

    def _after_item(self, closer: str, after: str) -> Generator[None, str, str]:
        """Return the first character of the next item, or `closer`."""
        character = yield from skip_space(after)
        if character == ",":
            character = yield from skip_space()
            if character == closer:
                raise NotACall
            return character
        if character != closer:
            raise NotACall
        return character

    def _string(self, first: str, out: Out) -> Generator[None, str, None]:
        """Read a string from its opening quote to its closing one; emit it as JSON."""
        quote = self._quote
        yield from read_one_of((quote,), first)
        out('"')
        held = ""
        while held != quote:
            held += yield
            while held and not quote.startswith(held):
                if is_mark(held[0]):
                    raise NotACall
                out(json.dumps(held[0], ensure_ascii=False)[1:-1])
                held = held[1:]
        out('"')


def _up_to(end: str, first: str, most: int) -> Generator[None, str, str]:
    """Read a name, and the character after it."""
    name, character = "", first
    while character != end:
        name += character
        if len(name) > most or character in NOT_IN_KEYS or is_mark(character):
            raise NotACall
        character = yield
    if not name:
        raise NotACall
    return name
