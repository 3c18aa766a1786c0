"""Schemas in the forms in which Zod 4.6 writes its kinds of strings and containers: a string has a `format` that is a
name, with its whole rule in `pattern` beside it. Each is accepted or refused as docs/structured-outputs.md lists it,
takes valid values, and leaves out invalid ones where the schema says so."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.model import tiny
from kvferry.text.grammar.compiler import GrammarCompiler

COMPILER = GrammarCompiler(tiny.tokenizer(tiny.config()))
EOS = tiny.config().eos_token_ids[0]
PAGE = Path(__file__).parents[4] / "docs" / "structured-outputs.md"
BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
Kind = tuple[dict[str, Any], list[Any], list[Any]]


def text(pattern: str | None = None, form: str | None = None, **others: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string", "format": form, "pattern": pattern, **others}
    return {name: value for name, value in found.items() if value is not None}


def members(properties: dict[str, Any], *required: str, **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {}), **others}


TEXT, NUMBER = {"type": "string"}, {"type": "number"}
STRINGS: dict[str, Kind] = {
    "string": (TEXT, ["", "a b"], [1, None]),
    "email": (text(r"^[a-z0-9._+-]+@([a-z0-9-]+\.)+[a-z]{2,}$", "email"), ["ann@site.org"], ["ann", "a@b"]),
    "uuid": (
        text(r"^([0-9a-f]{8}-[0-9a-f]{4}-[1-8][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12})$", "uuid"),
        ["0f8fad5b-d9cb-469f-a165-70867728950e"],
        ["0f8fad5b", "0f8fad5b-d9cb-469f-a165-70867728950g"],
    ),
    "guid": (
        text(r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12})$", "uuid"),
        ["0f8fad5b-d9cb-069f-0165-70867728950e"],
        ["0f8fad5b"],
    ),
    "url": (text(form="uri"), ["https://site.org/a?b=c"], ["not a url"]),
    "emoji": (text("^[\U0001f600-\U0001f64f]+$", "emoji"), ["\U0001f600"], ["a", ""]),
    "base64": (
        text(
            r"^$|^(?:[0-9a-zA-Z+/]{4})*(?:[0-9a-zA-Z+/]{2}==|[0-9a-zA-Z+/]{3}=)?$", "base64", contentEncoding="base64"
        ),
        ["", "QQ==", "QUJD"],
        ["Q", "QQ"],
    ),
    "base64url": (text(r"^[A-Za-z0-9_-]*$", "base64url", contentEncoding="base64url"), ["", "a-_"], ["a+", "a="]),
    "nanoid": (text(r"^[a-zA-Z0-9_-]{21}$", "nanoid"), ["x" * 21], ["x" * 20, "x" * 22]),
    "cuid": (text(r"^[cC][0-9a-z]{6,}$", "cuid"), ["c123456"], ["c12", "d123456"]),
    "cuid2": (text(r"^[0-9a-z]+$", "cuid2"), ["t0z"], ["", "T"]),
    "ulid": (text(r"^[0-7][0-9A-HJKMNP-TV-Z]{25}$", "ulid"), ["0" + "Z" * 25], ["9" + "Z" * 25, "0" + "I" * 25]),
    "xid": (text(r"^[0-9a-v]{20}$", "xid"), ["0v" * 10], ["w" * 20]),
    "ksuid": (text(r"^[A-Za-z0-9]{27}$", "ksuid"), ["a" * 27], ["a" * 26]),
    "ipv4": (text(rf"^(?:{BYTE}\.){{3}}{BYTE}$", "ipv4"), ["10.0.0.255"], ["10.0.0.256", "1.2.3"]),
    "ipv6": (text(r"^(([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|::1)$", "ipv6"), ["::1", "1:2:3:4:5:6:7:8"], ["1:2"]),
    "cidrv4": (text(rf"^(?:{BYTE}\.){{3}}{BYTE}/([0-9]|[12][0-9]|3[0-2])$", "cidrv4"), ["10.0.0.0/8"], ["10.0.0.0/33"]),
    "cidrv6": (
        text(r"^(([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|::)/([0-9]{1,2})$", "cidrv6"),
        ["::/64"],
        ["::", "::/x"],
    ),
    "mac": (text(r"^(?:[0-9A-F]{2}:){5}[0-9A-F]{2}$", "mac"), ["00:1A:2B:3C:4D:5E"], ["00:1A"]),
    "e164": (text(r"^\+[1-9]\d{6,14}$", "e164"), ["+4930123456"], ["4930123456", "+0301234567"]),
    "jwt": (text(form="jwt"), ["a.b.c"], [1]),
    "hex": (text(r"^[0-9a-fA-F]*$", "hex"), ["", "0aF"], ["g"]),
    "hostname": (
        text(r"^(?=.{1,60}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,20}[a-zA-Z0-9])?(?:\.[a-zA-Z0-9]{1,20})*\.?$", "hostname"),
        ["site.org", "a"],
        ["-a", "a..b", ".".join(["abcdefghij"] * 6)],
    ),
    "hash": (text(r"^[0-9a-fA-F]{32}$", "md5_hex"), ["0f" * 16], ["0f" * 15]),
    "iso.date": (
        text(r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$", "date"),
        ["2026-02-28"],
        ["2026-13-01", "2026"],
    ),
    "iso.time": (text(r"^([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d+)?)?$"), ["09:30", "23:59:59.5"], ["24:00"]),
    "iso.datetime": (
        text(r"^\d{4}-\d{2}-\d{2}T([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?Z$", "date-time"),
        ["2026-02-28T09:30:00Z"],
        ["2026-02-28", "2026-02-28T24:30:00Z"],
    ),
    "iso.duration": (text(r"^P(?!$)(\d+D)?(T(?=\d)(\d+H)?(\d+M)?)?$", "duration"), [], []),
    "lowercase": (text("^[^A-Z]*$", "lowercase"), ["ab 1"], ["aB"]),
    "uppercase": (text("^[^a-z]*$", "uppercase"), ["AB 1"], ["aB"]),
    "startsWith": (text("^ab.*", "starts_with"), ["abc"], ["ba"]),
    "endsWith": (text(".*yz$", "ends_with"), ["xyz"], ["yzx"]),
    "includes": (text("mm", "includes"), ["hammer"], ["ham"]),
    "regex": (text("^[a-c]{2,4}$"), ["ab"], ["a", "abd"]),
    "lengths": (text(minLength=2, maxLength=3), ["ab", "abc"], ["a", "abcd"]),
}
LEFT, RIGHT = members({"a": TEXT}, "a"), members({"b": NUMBER}, "b")
CLOSED = {"additionalProperties": False}
CONTAINERS: dict[str, Kind] = {
    "object": (members({"a": TEXT}, "a", **CLOSED), [{"a": "x"}], [{}, {"a": 1}, {"a": "x", "b": 1}]),
    "looseObject": (members({"a": TEXT}, "a", additionalProperties={}), [{"a": "x", "b": 1}], [{"b": 1}, {"a": 1}]),
    "partial": (members({"a": TEXT}, **CLOSED), [{}, {"a": "x"}], [{"a": 1}]),
    "catchall": (members({"a": TEXT}, "a", additionalProperties=NUMBER), [{"a": "x", "b": 1}], [{"a": "x", "b": "c"}]),
    "record": (
        {"type": "object", "propertyNames": TEXT, "additionalProperties": NUMBER},
        [{}, {"k": 1.5}],
        [{"k": "x"}, []],
    ),
    "record of an enum": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["k", "l"]},
            "additionalProperties": NUMBER,
            "required": ["k", "l"],
        },
        [{"k": 1, "l": 2}],
        [{"k": 1}, {"k": 1, "l": "x"}, {"k": 1, "l": 2, "m": 3}],
    ),
    "partialRecord": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["k", "l"]},
            "additionalProperties": NUMBER,
        },
        [{}, {"l": 2}],
        [{"m": 3}],
    ),
    "record of a pattern": (
        {"type": "object", "propertyNames": text("^x_", "regex"), "additionalProperties": NUMBER},
        [{"x_a": 1}],
        [{"y": 1}],
    ),
    "record of UUIDs": (
        {"type": "object", "propertyNames": STRINGS["uuid"][0], "additionalProperties": NUMBER},
        [{"0f8fad5b-d9cb-469f-a165-70867728950e": 1}],
        [{"0f8fad5b": 1}, {"0f8fad5b-d9cb-469f-a165-70867728950e": "x"}],
    ),
    "never": (members({"a": TEXT, "b": {"not": {}}}, "a", **CLOSED), [{"a": "x"}], [{"a": "x", "b": 1}]),
    "array of never": ({"type": "array", "items": {"not": {}}}, [[]], [[1], [None]]),
    "float32": (
        {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
        [0, -1.5, 1000000000000.25],
        ["1"],
    ),
    "int32": ({"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}, [2**31 - 1, -5], [2**31, 1.5]),
    "array": (
        {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 2},
        [["a"], ["a", "b"]],
        [[], ["a", "b", "c"]],
    ),
    "tuple": (
        {"type": "array", "prefixItems": [TEXT, NUMBER], "items": False, "minItems": 2, "maxItems": 2},
        [["a", 1]],
        [["a"], [1, "a"]],
    ),
    "tuple of draft 7": (
        {"type": "array", "items": [TEXT, NUMBER], "additionalItems": False, "minItems": 2, "maxItems": 2},
        [["a", 1]],
        [["a"]],
    ),
    "union": ({"type": ["string", "number"]}, ["a", 1], [None]),
    "discriminatedUnion": (
        {"oneOf": [members({"t": {"type": "string", "const": c}}, "t", **CLOSED) for c in ("a", "b")]},
        [{"t": "a"}, {"t": "b"}],
        [{"t": "c"}, {}],
    ),
    "intersection": (members({"a": TEXT, "b": NUMBER}, "a", "b", **CLOSED), [{"a": "x", "b": 1}], [{"a": "x"}]),
    "xor": ({"oneOf": [LEFT, RIGHT]}, [], []),
    "nullable": ({"type": ["string", "null"]}, ["a", None], [1]),
    "literal": ({"enum": ["a", 1, True]}, ["a", 1, True], ["b", False]),
    "enum": ({"type": "string", "enum": ["x", "y"]}, ["x"], ["z"]),
    "default": (members({"a": TEXT | {"default": "q"}}, **CLOSED), [{}, {"a": "x"}], [{"a": 1}]),
    "recursive": (
        members({"c": {"type": "array", "items": {"$ref": "#"}}}, "c", **CLOSED),
        [{"c": []}, {"c": [{"c": []}]}],
        [{"c": [1]}],
    ),
}
KINDS = {**STRINGS, **CONTAINERS}


def accepts(schema: dict[str, Any], value: object) -> bool:
    state = COMPILER.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))).start()
    for token in json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode():
        if not state.allowed()[token]:
            return False
        state.advance([token])
    return bool(state.allowed()[EOS])


def refused() -> dict[str, str]:
    """Return the refused kinds of Zod that the page lists, with their keywords."""
    rows = re.findall(r"^\| Zod 4\.6 \| `z\.([\w.]+)\(.*?\)`[^|]* \| `([^|`]+)`", PAGE.read_text(), re.MULTILINE)
    return dict(rows)


def test_there_are_all_kinds_of_strings() -> None:
    assert len(STRINGS) == 35


def test_the_page_lists_the_refused_kinds() -> None:
    assert set(refused()) == {"iso.duration", "xor"}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_kind_is_accepted_or_listed(kind: str) -> None:
    schema = KINDS[kind][0]
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    if kind not in refused():
        COMPILER.check(constraint)
        return
    with pytest.raises(InvalidRequest) as found:
        COMPILER.check(constraint)
    assert refused()[kind] in found.value.message


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in refused()])
def test_a_kind_takes_its_values_and_no_others(kind: str) -> None:
    schema, good, bad = KINDS[kind]
    assert [value for value in good if not accepts(schema, value)] == []
    assert [value for value in bad if accepts(schema, value)] == []
