"""Calls in the format of Qwen 3 Coder: values are read by the schemas of the arguments."""

import json
from typing import Any

import pytest
from harness.fakes.answers import split

from kvferry.text.answers.marks import Marks
from kvferry.text.answers.registry import CallFormat
from kvferry.text.answers.xml_calls import KINDS, kinds_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "l": {"type": "array", "items": {"type": "string"}},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "mixed": {"type": ["string", "integer"]},
        "kind": {"$ref": "#/$defs/kind"},
        "any": {},
    },
    "$defs": {"kind": {"enum": ["1", "2"]}},
}


def read(text: str, **options: Any) -> tuple[str, list[str]]:
    """Return the content of an answer and the arguments of each call, for every piece size alike."""
    found = []
    for pieces in ([text], list(text)):
        content, _, calls = split(CallFormat.QWEN3_CODER, pieces, schemas={"f": SCHEMA}, **options)
        found.append((content, [arguments for _, _, arguments in calls]))
    assert found[0] == found[1]
    return found[0]


def value(name: str, text: str) -> Any:
    content, (arguments,) = read(
        f"<tool_call>\n<function=f>\n<parameter={name}>{text}</parameter>\n</function>\n</tool_call>"
    )
    assert content == ""
    return json.loads(arguments)[name]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("s", "\nOslo\n", "Oslo"),
        ("s", "Oslo", "Oslo"),
        ("s", "\n\n  a\n\n", "\n  a\n"),
        ("s", "\n", ""),
        ("s", "\n\n", ""),
        ("s", "", ""),
        ("s", "\n5\n", "5"),
        ("s", "\nnull\n", "null"),
        ("s", '\n"quoted" \\n \t\x01 é\n', '"quoted" \\n \t\x01 é'),
        ("s", "\nif a < b:\n</p></paramete\n<parameter=\n", "if a < b:\n</p></paramete\n<parameter="),
        ("i", "\n42\n", 42),
        ("i", " -7 ", -7),
        ("i", "\nforty\n", "forty"),
        ("i", "\n4 2\n", "4 2"),
        ("i", "\n\n", ""),
        ("n", "\n1.5e3\n", 1500.0),
        ("n", "\n1.\n", "1."),
        ("b", "\ntrue\n", True),
        ("b", "\nFalse\n", False),
        ("b", "\ntrue!\n", "true!"),
        ("o", '\n{\n  "a": [1, null]\n}\n', {"a": [1, None]}),
        ("o", "\n{'a': True}\n", {"a": True}),
        ("o", '\n{"a": \n', '{"a": '),
        ("l", '\n["a", "\\/"]\n', ["a", "/"]),
        ("l", "\n" + "[" * 80 + "\n", "[" * 80),
        ("maybe", "\nnull\n", None),
        ("maybe", "\nNone\n", None),
        ("maybe", "\n5\n", "5"),
        ("maybe", '\n"a"\n', '"a"'),
        ("mixed", "\n5\n", 5),
        ("mixed", "\n5.5\n", "5.5"),
        ("mixed", '\n"5"\n', "5"),
        ("mixed", "\n[5]\n", "[5]"),
        ("kind", "\n1\n", "1"),
        ("any", "\n1\n", 1),
        ("any", '\n{"a": 1}\n', {"a": 1}),
        ("any", "\ntext\n", "text"),
        ("other", "\n[1]\n", [1]),
    ],
)
def test_a_value_has_the_type_of_its_schema(name: str, text: str, expected: Any) -> None:
    assert value(name, text) == expected


CALL = "<function=f>\n<parameter=s>\nx\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        (f"Wait.\n<tool_call>\n{CALL}\n</tool_call>\n", "Wait.", ['{"s": "x"}']),
        (f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", "", ['{"s": "x"}'] * 2),
        (f"<tool_call>\n{CALL}\n{CALL}\n</tool_call>", "", ['{"s": "x"}'] * 2),
        (f"{CALL}\n</tool_call>", "", ['{"s": "x"}']),
        (CALL, "", ['{"s": "x"}']),
        (f"{CALL} done", "done", ['{"s": "x"}']),
        ("<tool_call><function=f></function></tool_call>", "", ["{}"]),
        ("<tool_call>\n<function=f>\n</function>\n</tool_call>", "", ["{}"]),
        (
            "<function=f><parameter=i>1</parameter><parameter=s>a</parameter></function>",
            "",
            ['{"i": 1, "s": "a"}'],
        ),
        # Damaged calls are content from the first wrong character on.
        ("<tool_call>junk", "<tool_call>junk", []),
        ('<tool_call>{"name": "f"}', '<tool_call>{"name": "f"}', []),
        ("<function=unknown></function>", "<function=unknown></function>", []),
        ("<function=f", "<function=f", []),
        ("<function=f>\nhello", "<function=f>\nhello", []),
        (f"<function={'f' * 80}>", f"<function={'f' * 80}>", []),
        ("<function=f><parameter=s>a</parameter>then", "then", ['{"s": "a"']),
        (
            "<function=f><parameter=s>a</parameter><parameter=s>b</parameter></function>",
            "b</parameter></function>",
            ['{"s": "a"'],
        ),
        ("<function=f><parameter=s>a</parameter><parameter=a<b>", "b>", ['{"s": "a"']),
        ("<function=f><parameter=s>abc", "", ['{"s": "abc']),
        ("<function=f><parameter=i>12", "", ['{"i": ']),
    ],
)
def test_calls_and_content(text: str, content: str, arguments: list[str]) -> None:
    found = read(text)
    assert found[1] == arguments
    assert found[0].endswith(content) if content else found[0] == ""


def test_strings_stream_before_they_are_complete() -> None:
    splits = split(CallFormat.QWEN3_CODER, ["<function=f><parameter=s>\nab\nc"], schemas={"f": SCHEMA})
    assert splits[2] == [("call_1", "f", '{"s": "ab\\nc')]


def test_a_control_token_ends_a_value() -> None:
    marks = Marks.of({"<tool_call>": 7, "</tool_call>": 8})
    begin, end = marks.by_token[7], marks.by_token[8]
    assert read(f"{begin}{CALL}{end}", marks=marks) == ("", ['{"s": "x"}'])
    assert read(f"{begin}<function=f><parameter=s>a{end}b", marks=marks) == ("b", ['{"s": "a'])
    assert read(f"<tool_call>{CALL}</tool_call>", marks=marks) == ("<tool_call></tool_call>", ['{"s": "x"}'])


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "number"}, {"number", "integer"}),
        ({"type": ["string", "null"], "enum": ["a", None, 1]}, {"string", "null"}),
        ({"const": 1.5}, {"number", "integer"}),
        ({"const": [1]}, {"array"}),
        ({"allOf": [{"$ref": "#/$defs/a"}, {"enum": ["x", 1]}]}, {"string"}),
        ({"oneOf": [{"$ref": "#/definitions/b"}, {"type": "object"}]}, {"boolean", "object"}),
        ({"$ref": "#/$defs/loop"}, KINDS),
        ({"$ref": "#/properties/a"}, KINDS),
        ({"$ref": "#/$defs/missing"}, KINDS),
        ({"type": ["string", {}]}, {"string"}),
        ({"type": "string", "anyOf": [{"$ref": "#/$defs/wide"}] * 500}, {"string"}),
        (True, KINDS),
    ],
)
def test_the_types_of_a_schema(schema: object, kinds: frozenset[str]) -> None:
    root = {
        "$defs": {
            "a": {"type": ["string", "boolean"]},
            "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]},
            "wide": {"anyOf": [{"$ref": "#/$defs/wide"}] * 500},
        },
        "definitions": {"b": {"enum": [True, False]}},
    }
    assert kinds_of(schema, root) == kinds
