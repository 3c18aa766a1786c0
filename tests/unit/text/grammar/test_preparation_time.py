"""The preparation of a constraint, which holds the interpreter's lock, takes time in proportion to its length.

The sources are as long as a constraint may be. Preparing them took 6 s to hours when a part was read again for each of
its characters; it takes at most 0.4 s of processor time now.
"""

import contextlib
import json
import time
from collections.abc import Callable

import pytest

from kvferry.core.constraint import MAX_CONSTRAINT_BYTES, Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.text.grammar.grammar_text import grammar_text
from kvferry.text.grammar.lark_text import NamedTokens

MAX_SECONDS = 5.0
TOKENS = NamedTokens({"<|a|>": 5, "<t>": 6}, ("<t>",))
_NAMES = [f"a{number}" for number in range(4000)]
_LONG_NAMES = [f"{number:061}" for number in range(1800)]
_LARGE = {"properties": {name: {"const": 1} for name in _NAMES}, "required": _NAMES}


def pattern(part: str) -> Callable[[int], str]:
    return lambda size: json.dumps({"type": "string", "pattern": "^" + part * (size // len(json.dumps(part)))})


def schema(value: object) -> Callable[[int], str]:
    return lambda _: json.dumps(value)


def tag(end: object, content: object) -> Callable[[int], str]:
    return schema({"format": {"type": "tag", "begin": "<a>", "end": end, "content": content}})


def repeated(start: str, part: str) -> Callable[[int], str]:
    return lambda size: start + part * ((size - len(start)) // len(part))


SCHEMA, GRAMMAR = ConstraintKind.JSON_SCHEMA, ConstraintKind.GRAMMAR
SOURCES: dict[str, tuple[ConstraintKind, Callable[[int], str]]] = {
    "open groups": (SCHEMA, pattern("(")),
    "groups": (SCHEMA, pattern("()")),
    "lookaheads": (SCHEMA, pattern("(?=a)")),
    "open properties": (SCHEMA, pattern("\\p{")),
    "open classes": (SCHEMA, pattern("[")),
    "flags": (SCHEMA, pattern("(?a")),
    "names by reference": (
        SCHEMA,
        schema({"$defs": {"a": {"enum": _NAMES}}, "allOf": [{"propertyNames": {"$ref": "#/$defs/a"}}] * 3000}),
    ),
    "members of names": (
        SCHEMA,
        schema({"propertyNames": {"enum": _NAMES}, "additionalProperties": {"enum": ["a" * 60] * 2000}}),
    ),
    "equal alternatives": (SCHEMA, schema({"$defs": {"a": _LARGE}, "oneOf": [{"$ref": "#/$defs/a"}] * 2000})),
    "many unions": (
        SCHEMA,
        schema({"$defs": {"a": _LARGE}, "anyOf": [{"oneOf": [{"$ref": "#/$defs/a"}] * 2}] * 1500}),
    ),
    "long constants": (
        SCHEMA,
        schema(
            {
                "$defs": {"a": {"properties": {"t": {"const": [1.5] * 25_000}}, "required": ["t"]}},
                "anyOf": [{"oneOf": [{"$ref": "#/$defs/a"}] * 2}] * 1500,
            }
        ),
    ),
    "ends and exclusions": (
        ConstraintKind.STRUCTURAL_TAG,
        tag([f"e{n}" for n in range(10_000)], {"type": "any_text", "excludes": [f"x{n}" for n in range(12_000)]}),
    ),
    "ends of alternatives": (
        ConstraintKind.STRUCTURAL_TAG,
        tag(
            [f"e{n}" for n in range(15_000)], {"type": "or", "elements": [{"type": "const_string", "value": "a"}] * 480}
        ),
    ),
    "a long end": (
        ConstraintKind.STRUCTURAL_TAG,
        tag("e" * 200_000, {"type": "or", "elements": [{"type": "any_text"}] * 480}),
    ),
    "other names": (
        SCHEMA,
        schema({"anyOf": [{"properties": {name: True}, "additionalProperties": {"const": 1}} for name in _LONG_NAMES]}),
    ),
    "long names": (GRAMMAR, repeated("start: x\n", "_")),
    "open strings": (GRAMMAR, repeated('start: "', '\\"')),
    "open patterns": (GRAMMAR, repeated("start: /", "\\/")),
    "schemas": (GRAMMAR, repeated("start: ", "%json [")),
    "rules of GBNF": (GRAMMAR, repeated('root ::= "a"\n', 'r ::= "a" r\n')),
    "alternatives of GBNF": (GRAMMAR, repeated('root ::= "a"', ' | "a"')),
}


@pytest.mark.parametrize("name", SOURCES)
def test_preparation_is_linear(name: str) -> None:
    kind, source = SOURCES[name]
    made = source(MAX_CONSTRAINT_BYTES - 100)
    assert len(made) > MAX_CONSTRAINT_BYTES // 3
    begun = time.process_time()
    with contextlib.suppress(InvalidRequest):
        grammar_text(Constraint(kind, made), TOKENS)
    assert time.process_time() - begun < MAX_SECONDS
