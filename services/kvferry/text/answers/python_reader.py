"""Reads Python literals character by character and emits them as JSON text; see `json_reader`.

Supported are strings, numbers in JSON's form, lists, dictionaries with string keys, True, False and None, and JSON's
true, false and null.
"""

import json
from collections.abc import Generator, Mapping

from kvferry.text.answers.json_reader import MAX_DEPTH, Out, Reader, read_number, skip_space
from kvferry.text.answers.marks import is_mark
from kvferry.text.answers.pieces import NotACall

_WORDS: Mapping[str, str] = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_ESCAPES: Mapping[str, str] = {
    "\\": "\\",
    "'": "'",
    '"': '"',
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\n": "",
}
_CODES: Mapping[str, int] = {"x": 2, "u": 4, "U": 8}
"""Number of hexadecimal digits after a backslash and this letter."""


def read_literal(first: str, out: Out, depth: int = 0) -> Reader:
    """Read a literal that begins with the character `first`; return the character read past its end, if any.

    Args:
        first: first character of the literal.
        out: receives the literal as JSON.
        depth: number of literals around this one.
    """
    if first in "\"'":
        yield from _string(first, out)
    elif first == "[":
        yield from _list(out, depth)
    elif first == "{":
        yield from _dictionary(out, depth)
    elif first.isalpha():
        yield from _word(first, out)
    else:
        return (yield from read_number(first, out))
    return ""


def _list(out: Out, depth: int) -> Generator[None, str, None]:
    if depth >= MAX_DEPTH:
        raise NotACall
    out("[")
    character = yield from skip_space()
    is_first = True
    while character != "]":
        if not is_first:
            out(", ")
        is_first = False
        after = yield from read_literal(character, out, depth + 1)
        character = yield from _after_item("]", after)
    out("]")


def _dictionary(out: Out, depth: int) -> Generator[None, str, None]:
    if depth >= MAX_DEPTH:
        raise NotACall
    out("{")
    character = yield from skip_space()
    is_first = True
    while character != "}":
        if character not in "\"'":
            raise NotACall
        if not is_first:
            out(", ")
        is_first = False
        yield from _string(character, out)
        if (yield from skip_space()) != ":":
            raise NotACall
        out(": ")
        character = yield from skip_space()
        after = yield from read_literal(character, out, depth + 1)
        character = yield from _after_item("}", after)
    out("}")


def _after_item(closer: str, after: str) -> Generator[None, str, str]:
    """Return the first character of the next item, or `closer`."""
    character = yield from skip_space(after)
    if character == ",":
        return (yield from skip_space())
    if character != closer:
        raise NotACall
    return character


def _word(first: str, out: Out) -> Generator[None, str, None]:
    word = first
    while word not in _WORDS:
        if not any(known.startswith(word) for known in _WORDS):
            raise NotACall
        word += yield
    out(_WORDS[word])


def _string(quote: str, out: Out) -> Generator[None, str, None]:
    out('"')
    while (character := (yield)) != quote:
        if character == "\\":
            escape = yield
            if is_mark(escape):
                raise NotACall
            if escape in _CODES:
                out((yield from _code(_CODES[escape])))
            else:
                # Python keeps the backslash of an unknown escape.
                out(json.dumps(_ESCAPES.get(escape, "\\" + escape), ensure_ascii=False)[1:-1])
        elif is_mark(character):
            raise NotACall
        else:
            out(json.dumps(character, ensure_ascii=False)[1:-1])
    out('"')


def _code(num_digits: int) -> Generator[None, str, str]:
    digits = ""
    for _ in range(num_digits):
        digits += yield
    try:
        code = int(digits, 16) if digits.isalnum() else -1
        return json.dumps(chr(code))[1:-1]
    except (ValueError, OverflowError):
        raise NotACall from None
