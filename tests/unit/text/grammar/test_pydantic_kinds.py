"""Schemas that Pydantic writes for its kinds of fields: each is accepted as it is, and each output is a value of its
kind. Sets are refused, since no grammar keeps members apart."""

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import random
import re
import typing
import uuid
from collections import OrderedDict, deque
from pathlib import Path
from typing import Annotated, Any, Literal

import annotated_types
import numpy as np
import pydantic
import pytest
import typing_extensions
from pydantic import BaseModel, Discriminator, Field, RootModel, Tag, TypeAdapter

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.model import tiny
from kvferry.text.grammar.compiler import GrammarCompiler

COMPILER = GrammarCompiler(tiny.tokenizer(tiny.config()))
EOS = list(tiny.config().eos_token_ids)
LONGEST = 3000


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str = "Rex"


class One(BaseModel):
    version: Literal[1]


class Two(BaseModel):
    version: Literal[2]


class Node(BaseModel):
    name: str
    children: list["Node"] = []


class Kennel(BaseModel, extra="forbid"):
    kind: Literal["kennel"]
    inner: list[Annotated["Kennel | Cat", Field(discriminator="kind")]] = Field(max_length=2)


class Point(typing.NamedTuple):
    x: int
    y: float


class Options(typing_extensions.TypedDict, total=False):
    a: int
    b: typing_extensions.Required[str]


class Closed(BaseModel, extra="forbid"):
    a: int
    alias: str = Field(alias="aliasOf")


class Open(BaseModel, extra="allow"):
    a: int


class Ids(RootModel[list[int]]):
    pass


def tag_of(value: Any) -> str:
    return "cat" if (value.get("kind") if isinstance(value, dict) else value.kind) == "cat" else "dog"


KINDS: dict[str, Any] = {
    "str": str,
    "str-lengths": Annotated[str, Field(min_length=2, max_length=4)],
    "str-pattern": Annotated[str, Field(pattern=r"^[a-z]{2}-\d+$")],
    "int": int,
    "int-range": Annotated[int, Field(ge=3, lt=9)],
    "int-multiple": Annotated[int, Field(multiple_of=5)],
    "int-64": Annotated[int, Field(ge=-(2**63), lt=2**63)],
    "int-unsigned": Annotated[int, Field(ge=0, le=2**64 - 1)],
    "float": float,
    "float-range": Annotated[float, Field(gt=0.5, le=2.5)],
    "bool": bool,
    "none": None,
    "bytes": bytes,
    "any": Any,
    "object": object,
    "decimal": decimal.Decimal,
    "date": datetime.date,
    "datetime": datetime.datetime,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "uuid": uuid.UUID,
    "path": pathlib.Path,
    "pattern": re.Pattern,
    "url": pydantic.AnyUrl,
    "http-url": pydantic.HttpUrl,
    "dsn": pydantic.PostgresDsn,
    "ip": ipaddress.IPv4Address,
    "ip-any": pydantic.IPvAnyAddress,
    "network": pydantic.IPvAnyNetwork,
    "interface": ipaddress.IPv6Interface,
    "secret": pydantic.SecretStr,
    "secret-bytes": pydantic.SecretBytes,
    "base64": pydantic.Base64Str,
    "base64-bytes": pydantic.Base64UrlBytes,
    "byte-size": pydantic.ByteSize,
    "json": pydantic.Json[int],
    "json-value": pydantic.JsonValue,
    "past": pydantic.PastDate,
    "aware": pydantic.AwareDatetime,
    "strict": pydantic.StrictInt,
    "enum": Color,
    "int-enum": Level,
    "literal": Literal["a", 1, True],
    "optional": int | None,
    "union": int | str,
    "list": Annotated[list[int], Field(min_length=1, max_length=3)],
    "deque": deque[int],
    "tuple": tuple[int, str],
    "tuple-open": tuple[int, ...],
    "named-tuple": Point,
    "dict": dict[str, int],
    "dict-enum": dict[Color, int],
    "dict-int": dict[int, str],
    "dict-pattern": dict[Annotated[str, Field(pattern="^x_")], int],
    "dict-uuid": dict[uuid.UUID, int],
    "dict-date": dict[datetime.date, int],
    "dict-datetime": dict[datetime.datetime, int],
    "dict-time": dict[datetime.time, int],
    "dict-ip": dict[ipaddress.IPv4Address, int],
    "dict-ip6": dict[ipaddress.IPv6Address, int],
    "dict-url": dict[pydantic.AnyUrl, int],
    "dict-lengths": dict[Annotated[str, annotated_types.Len(1, 3)], int],
    "ordered-dict": OrderedDict[str, int],
    "typed-dict": Options,
    "model": Cat,
    "model-defaults": Dog,
    "model-closed": Closed,
    "model-open": Open,
    "model-root": Ids,
    "model-recursive": Node,
    "model-recursive-union": Kennel,
    "union-models": One | Two,
    "union-tagged": Annotated[Cat | Dog, Field(discriminator="kind")],
    "union-tagged-int": Annotated[One | Two, Field(discriminator="version")],
    "union-callable": Annotated[Annotated[Cat, Tag("cat")] | Annotated[Dog, Tag("dog")], Discriminator(tag_of)],
}
SETS: dict[str, Any] = {"set": set[int], "frozenset": frozenset[str]}
"""Kinds whose members must differ, which no grammar can hold."""


def schema_of(kind: Any, mode: Literal["validation", "serialization"]) -> dict[str, Any]:
    return TypeAdapter(kind).json_schema(mode=mode)


def constraint(schema: dict[str, Any]) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def drawn(schema: dict[str, Any], seed: int) -> str:
    """Draw an output byte by byte, preferring bytes that end it."""
    dice = random.Random(seed)
    state = COMPILER.compile(constraint(schema)).start()
    output = bytearray()
    while len(output) < LONGEST:
        allowed = np.flatnonzero(state.allowed()).tolist()
        if set(EOS) & set(allowed) and (len(allowed) == len(EOS) or dice.random() < 0.7):
            return output.decode()
        plain = [byte for byte in allowed if 32 <= byte < 127]
        closing = [byte for byte in plain if byte in b'"}]']
        output.append(dice.choice(closing if closing and dice.random() < 0.7 else plain))
        state.advance([output[-1]])
    raise AssertionError(f"no end within {LONGEST} bytes: {bytes(output[:200])!r}")


def accepts(schema: dict[str, Any], text: str) -> bool:
    state = COMPILER.compile(constraint(schema)).start()
    for byte in text.encode():
        if not state.allowed()[byte]:
            return False
        state.advance([byte])
    return any(state.allowed()[token] for token in EOS)


@pytest.mark.parametrize("mode", ["validation", "serialization"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_schema_of_a_kind_is_accepted(kind: str, mode: Literal["validation", "serialization"]) -> None:
    COMPILER.check(constraint(schema_of(KINDS[kind], mode)))


@pytest.mark.parametrize("kind", list(SETS))
def test_members_that_must_differ_are_refused_by_the_keyword(kind: str) -> None:
    page = (Path(__file__).parents[4] / "docs" / "structured-outputs.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| Pydantic 2.14 ") and f"`{kind}[T]`" in line)
    keyword = row.split("|")[3].strip(" `")
    with pytest.raises(InvalidRequest, match=keyword):
        COMPILER.check(constraint(schema_of(SETS[kind], "validation")))


WRONG: dict[str, list[Any]] = {
    "str": [1, None],
    "str-lengths": ["a", "abcde"],
    "str-pattern": ["ab", "AB-1"],
    "int": ["1", 1.5],
    "int-range": [2, 9],
    "int-multiple": [7],
    "int-64": [2**63, -(2**63) - 1],
    "int-unsigned": [-1, 2**64],
    "float": ["x"],
    "float-range": [0.5, 3],
    "bool": [1, "true"],
    "none": ["", 0],
    "bytes": [1],
    "date": ["2026-13-01", "today"],
    "datetime": ["2026-02-28"],
    "uuid": ["0f8fad5b"],
    "ip": ["10.0.0.256", "a"],
    "enum": ["green"],
    "int-enum": [3, "1"],
    "literal": ["b", 2, False],
    "optional": ["1"],
    "union": [None, 1.5],
    "list": [[], [1, 2, 3, 4], ["1"]],
    "tuple": [[1], ["a", 1], [1, "a", 2]],
    "tuple-open": [["a"]],
    "named-tuple": [[1], ["a", 1]],
    "dict": [{"a": "b"}, []],
    "dict-enum": [{"green": 1}],
    "dict-pattern": [{"a": 1}],
    "dict-uuid": [{"0f8fad5b": 1}],
    "dict-date": [{"2026-02-30": 1}, {"2026-13-01": 1}],
    "dict-ip": [{"10.0.0.256": 1}],
    "dict-lengths": [{"abcd": 1}],
    "typed-dict": [{"a": 1}],
    "model": [{"kind": "cat"}, {"kind": "dog", "lives": 1}],
    "model-closed": [{"a": 1}, {"a": 1, "aliasOf": "x", "b": 2}],
    "model-root": [{"root": [1]}, ["1"]],
    "model-recursive-union": [{"kind": "kennel", "inner": [{"kind": "cow"}]}],
    "model-recursive": [{"name": "a", "children": [1]}],
    "union-models": [{"version": 3}],
    "union-tagged": [{"kind": "cow"}],
    "union-tagged-int": [{"version": "1"}],
}
"""Values that are none of their kind, where the schema says so."""


@pytest.mark.parametrize("kind", list(WRONG))
def test_a_value_that_the_schema_excludes_is_no_output(kind: str) -> None:
    schema = schema_of(KINDS[kind], "validation")
    for value in WRONG[kind]:
        assert not accepts(schema, json.dumps(value, separators=(",", ":"))), value


TIGHT = ("int", "float", "bool", "list", "tuple", "named", "dict", "typed", "model", "union", "enum", "literal", "str")
LOOSE = {"interface", "dict-int", "strict"}
"""Kinds whose schema does not say which strings are valid."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith(TIGHT) and kind not in LOOSE])
def test_each_output_is_a_value_of_its_kind(kind: str, seed: int) -> None:
    TypeAdapter(KINDS[kind]).validate_json(drawn(schema_of(KINDS[kind], "validation"), seed))
