"""Calls as XML, in the format of Qwen 3 Coder: each argument is text in an element of its own.

    <tool_call>
    <function=f>
    <parameter=a>
    the value of a
    </parameter>
    </function>
    </tool_call>

A value has no quotes and no escapes; the line break after the opening tag and the one before the closing tag are not
part of it. The schema of a tool's arguments says whether a value is a string, which stays as it is, or JSON. Values of
unknown type, and those that may be strings or something else, are JSON, or strings if they are not JSON of one of the
types. Values that must not be strings, and are not JSON, are strings too. Literals of Python are read like JSON, since
chat templates write them.
"""

import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import chain

from kvferry.text.answers.calls import Calls
from kvferry.text.answers.json_reader import Out, Reader, read_one_of, read_value, skip_space
from kvferry.text.answers.marks import MARKERS, Marks, is_mark
from kvferry.text.answers.pieces import NotACall
from kvferry.text.answers.python_reader import read_literal

_OPENER, _CLOSER = MARKERS[:2]
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_ENDS = (f"\n{END_PARAMETER}", END_PARAMETER)
_MAX_KEY = 256
_MAX_KEYS = 1024
_MAX_VISITS = 256
_MAX_DEPTH = 16
"""Maximum number, and nesting depth, of the schemas that are visited to find the types of a value."""
KINDS = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
"""The types of JSON Schema."""
_TEXT = frozenset({"string", "null"})
_NULLS = frozenset({"null", "None"})
_KIND_BY_FIRST: Mapping[str, str] = {
    "t": "boolean",
    "f": "boolean",
    "n": "null",
    "{": "object",
    "[": "array",
    '"': "string",
}


class Qwen3Coder:
    """Reads calls of the format of Qwen 3 Coder. `<tool_call>` before a function, and its end, may be missing."""

    at_start: tuple[str, ...] = ()

    def __init__(self, marks: Marks) -> None:
        self._opener, self._closer = marks.written(_OPENER), marks.written(_CLOSER)
        self.openers = (self._opener, FUNCTION)

    def read(self, opener: str, calls: Calls) -> Generator[None, str, None]:
        """Read functions after `<tool_call>` or `<function=`, up to the tag that ends the call.

        Raises:
            NotACall: the text is not a call of this format.
        """
        if opener != FUNCTION:
            yield from read_one_of((FUNCTION,), (yield from skip_space()))
        while True:
            yield from _function(calls)
            character = yield from skip_space()
            if (yield from read_one_of((self._closer, FUNCTION), character)) == self._closer:
                return


def _function(calls: Calls) -> Generator[None, str, None]:
    """Read a function after `<function=`, up to its end."""
    name = yield from _up_to_bracket(64)
    if name not in calls.names:
        raise NotACall
    schema = calls.schemas.get(name, {})
    properties = schema.get("properties")
    keys: set[str] = set()
    while True:
        character = yield from skip_space()
        if (yield from read_one_of((PARAMETER, END_FUNCTION), character)) == END_FUNCTION:
            break
        key = yield from _up_to_bracket(_MAX_KEY)
        if key in keys or len(keys) >= _MAX_KEYS:
            raise NotACall
        if not keys:
            calls.begin(name)
        calls.arguments(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        keys.add(key)
        value = properties.get(key) if isinstance(properties, Mapping) else None
        yield from _value(kinds_of(value, schema), calls.arguments)
    if not keys:
        calls.begin(name)
    calls.arguments("}" if keys else "{}")
    calls.end()


def _value(kinds: frozenset[str], out: Out) -> Generator[None, str, None]:
    """Read a value after its opening tag, and the closing tag; emit it as JSON."""
    if kinds == {"string"}:
        out('"')
        yield from _text(lambda text: out(json.dumps(text, ensure_ascii=False)[1:-1]))
        out('"')
        return
    pieces: list[str] = []
    yield from _text(pieces.append)
    out(_as_json("".join(pieces), kinds))


def _text(out: Out) -> Generator[None, str, None]:
    """Read text up to `</parameter>`, without the line breaks next to the tags."""
    held = yield
    if held == "\n":
        held = yield
    while True:
        if is_mark(held[-1]):
            raise NotACall
        while held and not any(end.startswith(held) for end in _ENDS):
            out(held[0])
            held = held[1:]
        if held in _ENDS:
            return
        held += yield


def _up_to_bracket(most: int) -> Generator[None, str, str]:
    """Read a name in a tag, and the bracket after it."""
    name = ""
    while (character := (yield)) != ">":
        name += character
        if len(name) > most or character in "<\n" or is_mark(character):
            raise NotACall
    return name


def _as_json(text: str, kinds: frozenset[str]) -> str:
    """Return the JSON of a value that may be of several types."""
    quoted = json.dumps(text, ensure_ascii=False)
    if kinds <= _TEXT:
        return "null" if "null" in kinds and text.strip() in _NULLS else quoted
    found = next(_literals(text.strip()), None)
    if found is None or ("string" in kinds and _kind_of(found) not in kinds):
        return quoted
    return found


def _literals(text: str) -> Iterator[str]:
    """Yield the JSON of a text that is JSON or a literal of Python."""
    for read in (read_value, read_literal):
        pieces: list[str] = []
        if text and _is_whole(read(text[0], pieces.append), text[1:]):
            yield "".join(pieces)


def _is_whole(reader: Reader, text: str) -> bool:
    """Return whether a value ends at the end of a text, and not before."""
    num_read = 0
    try:
        next(reader)
        for character in chain(text, "\n"):
            num_read += 1
            reader.send(character)
    except NotACall:
        return False
    except StopIteration as stop:
        return num_read == len(text) + bool(stop.value)
    return False


def kind_of(value: object) -> str:
    """Return the type of a value of JSON."""
    return _kind_of(json.dumps(value))


def _kind_of(value: str) -> str:
    first = value[0]
    if first in _KIND_BY_FIRST:
        return _KIND_BY_FIRST[first]
    return "integer" if value.lstrip("-").isdigit() else "number"


def kinds_of(schema: object, root: Mapping[str, object]) -> frozenset[str]:
    """Return the types that a schema permits; more than these if it is too complex, or refers to other places than the
    definitions of `root`.

    Args:
        schema: schema of a value.
        root: the schema that has the definitions.
    """
    return _kinds(schema, root, iter(range(_MAX_VISITS)), 0)


def _kinds(schema: object, root: Mapping[str, object], visits: Iterator[int], depth: int) -> frozenset[str]:
    kinds = KINDS
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or next(visits, None) is None:
        return kinds

    def inner(schemas: Iterable[object]) -> Iterator[frozenset[str]]:
        return (_kinds(each, root, visits, depth + 1) for each in schemas)

    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        kinds &= _with_integers(each for each in named if isinstance(each, str))
    for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if isinstance(values, list):
            kinds &= _with_integers(map(kind_of, values))
    if isinstance(schema.get("$ref"), str):
        kinds = kinds.intersection(*inner([definition(schema["$ref"], root)]))
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            kinds &= frozenset[str]().union(*inner(schema[keyword]))
    if isinstance(schema.get("allOf"), list):
        kinds = kinds.intersection(*inner(schema["allOf"]))
    return kinds


def _with_integers(kinds: Iterable[str]) -> frozenset[str]:
    found = frozenset(kinds)
    return found | {"integer"} if "number" in found else found


def definition(reference: str, root: Mapping[str, object]) -> object:
    """Return the definition that a reference names; `None` for references to other places.

    Args:
        reference: the reference.
        root: the schema that has the definitions.
    """
    start, _, name = reference.rpartition("/")
    definitions = root.get(start.removeprefix("#/")) if start in ("#/$defs", "#/definitions") else None
    return definitions.get(name) if isinstance(definitions, Mapping) else None
