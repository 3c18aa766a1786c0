"""Reads JSON character by character: readers are generators that receive one character at a time.

A reader passes the value's text on while it reads, so that a call's arguments stream, and raises `NotACall` at the
first character that cannot continue a JSON text (RFC 8259). The only leniency: control characters in a string, which
models write and JSON forbids, are passed on as escapes. Nesting is bounded by `MAX_DEPTH`.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence

from kvferry.text.answers.marks import is_mark
from kvferry.text.answers.pieces import NotACall

MAX_DEPTH = 64
"""Maximum nesting depth of arrays and objects; deeper values are not arguments of a call."""
MAX_SHORT_STRING = 512
"""Maximum number of characters of a string that is needed as a whole, such as a key or a name."""
SPACE = " \t\r\n"
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrt')

Reader = Generator[None, str, str]
"""Generator that receives characters by `send`. Returns the character it read past the end of the value, or an empty
string."""
Out = Callable[[str], None]
"""Receives the text that was read."""

_NUMBERS: Mapping[str, Mapping[str, str]] = {
    "start": {"-": "minus", "0": "zero", "1": "whole"},
    "minus": {"0": "zero", "1": "whole"},
    "zero": {".": "point", "e": "exponent"},
    "whole": {"0": "whole", "1": "whole", ".": "point", "e": "exponent"},
    "point": {"0": "fraction", "1": "fraction"},
    "fraction": {"0": "fraction", "1": "fraction", "e": "exponent"},
    "exponent": {"+": "sign", "-": "sign", "0": "power", "1": "power"},
    "sign": {"0": "power", "1": "power"},
    "power": {"0": "power", "1": "power"},
}
"""Transitions of a number's state by kind of character, where 1 stands for the digits 1 to 9."""
_COMPLETE = frozenset({"zero", "whole", "fraction", "power"})


def ignored(_text: str) -> None:
    """Drop text that was read."""


def read_value(first: str, out: Out, depth: int = 0) -> Reader:
    """Read a value that begins with the character `first`.

    Args:
        first: first character of the value.
        out: receives the text of the value.
        depth: number of values around this one.
    """
    if first == "{":
        yield from read_object(out, depth)
    elif first == "[":
        yield from _array(out, depth)
    elif first == '"':
        yield from _string(out)
    elif first in _WORDS:
        yield from read_word(_WORDS[first], out)
    else:
        return (yield from read_number(first, out))
    return ""


def read_object(out: Out, depth: int = 0) -> Generator[None, str, None]:
    """Read an object after its opening brace, and emit it with the brace.

    Args:
        out: called with each piece of text.
        depth: number of enclosing objects and arrays.

    Raises:
        NotACall: the text is not a JSON object, or is nested too deeply.
    """
    if depth >= MAX_DEPTH:
        raise NotACall
    out("{")
    character = yield from _token(out)
    if character == "}":
        out("}")
        return
    while True:
        if character != '"':
            raise NotACall
        yield from _string(out)
        character = yield from _token(out)
        if character != ":":
            raise NotACall
        out(":")
        character = yield from _token(out)
        after = yield from read_value(character, out, depth + 1)
        character = yield from _token(out, after)
        if character == "}":
            out("}")
            return
        if character != ",":
            raise NotACall
        out(",")
        character = yield from _token(out)


def _array(out: Out, depth: int) -> Generator[None, str, None]:
    if depth >= MAX_DEPTH:
        raise NotACall
    out("[")
    character = yield from _token(out)
    if character == "]":
        out("]")
        return
    while True:
        after = yield from read_value(character, out, depth + 1)
        character = yield from _token(out, after)
        if character == "]":
            out("]")
            return
        if character != ",":
            raise NotACall
        out(",")
        character = yield from _token(out)


def _string(out: Out) -> Generator[None, str, None]:
    """Read a string after its opening quote, and emit it with the quote."""
    out('"')
    while (character := (yield)) != '"':
        if character == "\\":
            escape = yield
            if escape == "u":
                digits = ""
                for _ in range(4):
                    digits += yield
                if not _HEX.issuperset(digits):
                    raise NotACall
                out("\\u" + digits)
            elif escape in _ESCAPES:
                out("\\" + escape)
            else:
                raise NotACall
        elif is_mark(character):
            raise NotACall
        else:
            out(character if character >= " " else json.dumps(character)[1:-1])
    out('"')


def read_short_string() -> Generator[None, str, str]:
    """Read a string after its opening quote and return its value; at most `MAX_SHORT_STRING` characters.

    Raises:
        NotACall: the string is longer, or is not valid JSON.
    """
    parts: list[str] = []
    size = 0

    def out(text: str) -> None:
        nonlocal size
        size += len(text)
        if size > MAX_SHORT_STRING:
            raise NotACall
        parts.append(text)

    yield from _string(out)
    value: str = json.loads("".join(parts))
    return value


def read_number(first: str, out: Out) -> Reader:
    """Read a number; it ends before the first character that does not continue it, which is returned.

    Args:
        first: first character of the number.
        out: receives the text of the number.

    Raises:
        NotACall: the text is not a JSON number.
    """
    state, character = "start", first
    while True:
        kind = "1" if "1" <= character <= "9" else "e" if character == "E" else character
        following = _NUMBERS[state].get(kind)
        if following is None:
            if state not in _COMPLETE:
                raise NotACall
            return character
        state = following
        out(character)
        character = yield


def read_word(word: str, out: Out) -> Generator[None, str, None]:
    """Read the rest of `word` after its first character, and emit the whole word.

    Args:
        word: the expected word, for example `true`.
        out: receives its text.

    Raises:
        NotACall: the text differs from `word`.
    """
    out(word[0])
    for expected in word[1:]:
        if (yield) != expected:
            raise NotACall
        out(expected)


def read_one_of(words: Sequence[str], first: str) -> Generator[None, str, str]:
    """Read one of several words, none of which begins another one, and return it.

    Args:
        words: the expected words.
        first: first character of the word.

    Raises:
        NotACall: the text differs from all words.
    """
    text = first
    while text not in words:
        if not any(word.startswith(text) for word in words):
            raise NotACall
        text += yield
    return text


def skip_space(first: str = "") -> Generator[None, str, str]:
    """Skip whitespace and return the next character. `first`, if not empty, was read already."""
    character = first or (yield)
    while character in SPACE:
        character = yield
    return character


def _token(out: Out, first: str = "") -> Generator[None, str, str]:
    """Emit whitespace and return the next character."""
    character = first or (yield)
    while character in SPACE:
        out(character)
        character = yield
    return character


_WORDS: Mapping[str, str] = {"t": "true", "f": "false", "n": "null"}
