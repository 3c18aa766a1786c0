"""Calls as Python calls with keyword arguments: a list of them, `[f(a=1), g(b="x")]`, or one in each line between
`<function_calls>` and `</function_calls>`, as Olmo 3 writes them."""

from collections.abc import Generator

from kvferry.text.answers.calls import Calls
from kvferry.text.answers.json_reader import SPACE, read_one_of, skip_space
from kvferry.text.answers.marks import Marks
from kvferry.text.answers.pieces import NotACall
from kvferry.text.answers.python_reader import read_literal

OLMO3_OPENER, OLMO3_CLOSER = "<function_calls>", "</function_calls>"
_MAX_KEYWORD = 256
_MAX_KEYWORDS = 1024


class Pythonic:
    """Reads calls of the pythonic format."""

    at_start: tuple[str, ...] = ()

    def __init__(self, _marks: Marks) -> None:
        self.openers = ("[",)

    def read(self, _opener: str, calls: Calls) -> Generator[None, str, None]:
        """Read calls after the opening bracket.

        Raises:
            NotACall: the text is not a call of this format.
        """
        character = yield from skip_space()
        while True:
            yield from _call(character, calls)
            character = yield from skip_space()
            if character == ",":
                character = yield from skip_space()
                if character != "]":
                    continue
            if character == "]":
                return
            raise NotACall


class Olmo3:
    """Reads calls of the format of Olmo 3."""

    at_start: tuple[str, ...] = ()

    def __init__(self, marks: Marks) -> None:
        self.openers = (marks.written(OLMO3_OPENER),)
        self._closer = marks.written(OLMO3_CLOSER)

    def read(self, _opener: str, calls: Calls) -> Generator[None, str, None]:
        """Read calls up to the closing tag.

        Raises:
            NotACall: the text is not a call of this format.
        """
        character = yield from skip_space()
        while True:
            yield from _call(character, calls)
            character = yield from skip_space()
            if character == self._closer[0]:
                yield from read_one_of((self._closer,), character)
                return


def _call(first: str, calls: Calls) -> Generator[None, str, None]:
    name = yield from _name(first, calls)
    character = yield from skip_space()
    keywords: set[str] = set()
    while character != ")":
        keyword, character = yield from _keyword(character)
        if (yield from skip_space(character)) != "=" or keyword in keywords or len(keywords) >= _MAX_KEYWORDS:
            raise NotACall
        if keywords:
            calls.arguments(f', "{keyword}": ')
        else:
            calls.begin(name)
            calls.arguments(f'{{"{keyword}": ')
        keywords.add(keyword)
        character = yield from skip_space()
        after = yield from read_literal(character, calls.arguments)
        character = yield from skip_space(after)
        if character == ",":
            character = yield from skip_space()
        elif character != ")":
            raise NotACall
    if keywords:
        calls.arguments("}")
    else:
        calls.begin(name)
        calls.arguments("{}")
    calls.end()


def _name(first: str, calls: Calls) -> Generator[None, str, str]:
    """Read the name of an offered tool and the parenthesis after it; fail as soon as no name matches."""
    name, possible = "", list(calls.names)
    character = first
    while character != "(":
        name += character
        possible = [other for other in possible if other.startswith(name)]
        if not possible:
            raise NotACall
        character = yield
        if character in SPACE and (character := (yield from skip_space())) != "(":
            raise NotACall
    if name not in possible:
        raise NotACall
    return name


def _keyword(first: str) -> Generator[None, str, tuple[str, str]]:
    """Read an identifier; return it and the character after it."""
    keyword, character = "", first
    while character == "_" or character.isalnum():
        keyword += character
        if len(keyword) > _MAX_KEYWORD:
            raise NotACall
        character = yield
    if not keyword.isidentifier():
        raise NotACall
    return keyword, character
