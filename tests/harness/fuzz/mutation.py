"""Changes valid inputs: bytes at random, or a value inside of JSON, MessagePack and protobuf messages."""

import json
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

MAX_PARTS = 1 << 15
"""Most values in one mutated document: repeated parts of repeated parts would otherwise exhaust the memory."""

_NUMBERS = (0, 1, 2, 7, 127, 128, 255, 256, 65535, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, 1 << 53, 1 << 63)
_LARGEST = (1 << 64) - 1
_VALUES: tuple[object, ...] = (
    *(None, True, False, 0, -1, 1, 1 << 20, 1 << 31, 1 << 40, 1 << 63, 1 << 64, -(1 << 63), 0.5, -0.0, 1e300, 1e-310),
    *(
        float("nan"),
        float("inf"),
        "",
        "a",
        "\x00",
        "\ud800",
        "<|im_end|>",
        "\u202e",
        "x" * 5000,
        "9" * 5000,
        [],
        {},
        [[]],
    ),
    *([0] * 5000, [None], {"": ""}, [1, "a"], [["a", "b"]] * 50, {"a": {"a": {"a": 1}}}, "%s%d", "..", "/dev/zero"),
)


def bytes_at_random(data: bytes, random: Random, words: Sequence[bytes] = (), most: int = 1 << 16) -> bytes:
    """Change some bytes, remove, repeat and exchange parts, and insert words of the format."""
    made = bytearray(data)
    for _ in range(1 << random.randrange(4)):
        at = random.randrange(len(made) + 1)
        size = min(random.choice((1, 2, 4, 8, 16, 64, 512)), len(made) - at)
        match random.randrange(9):
            case 0 if size:
                made[at] ^= 1 << random.randrange(8)
            case 1 if size:
                made[at] = random.randrange(256)
            case 2:
                del made[at : at + size]
            case 3:
                made[at:at] = made[at : at + size] * random.choice((1, 2, 50))
            case 4 | 5:
                number = random.choice((*_NUMBERS, _LARGEST)) + random.choice((0, 0, -1, 1))
                width, code = random.choice(((1, "B"), (2, "H"), (4, "I"), (8, "Q")))
                made[at : at + width] = struct.pack(random.choice("<<<>") + code, number % (1 << (8 * width)))
            case 6 if words:
                made[at : at + random.choice((0, size))] = random.choice(words)
            case 7:
                other = random.randrange(len(made) + 1)
                made[at : at + size] = made[other : other + size]
            case 8 if random.random() < 0.2:
                del made[at:]
    return bytes(made[:most])


def json_at_random(data: bytes, random: Random, words: Sequence[str] = ()) -> bytes:
    """Change values of a JSON document. Occasionally, or if the input is not JSON, change its bytes."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return bytes_at_random(data, random)
    if random.random() < 0.15:
        return bytes_at_random(data, random)
    for _ in range(random.choice((1, 1, 2, 4))):
        value = _changed(value, random, (*_VALUES, *words))
        if _num_parts(value) > MAX_PARTS:
            return data
    return json.dumps(value).encode("utf-8", "replace")


def packed_at_random(data: bytes, random: Random) -> bytes:
    """Change values of a MessagePack document."""
    try:
        value = msgspec.msgpack.decode(data)
        if random.random() < 0.2:
            return bytes_at_random(data, random)
        for _ in range(random.choice((1, 1, 2))):
            value = _changed(value, random, (*_VALUES, b"", b"\x00" * 16, b"\xff" * 5000))
            if _num_parts(value) > MAX_PARTS:
                return data
        return msgspec.msgpack.encode(value)
    except (msgspec.MsgspecError, OverflowError, UnicodeError, RecursionError):
        return bytes_at_random(data, random)


def message_at_random(message: Any, random: Random, depth: int = 0) -> None:
    """Set fields of a protobuf message to values at and beyond their limits, in place."""
    fields = list(message.DESCRIPTOR.fields)
    for field in random.sample(fields, min(len(fields), random.choice((1, 1, 2, 4)))):
        if random.random() < 0.1:
            message.ClearField(field.name)
            continue
        if field.message_type is not None:
            if field.message_type.GetOptions().map_entry:
                continue
            if depth < 4:
                part = getattr(message, field.name)
                if field.is_repeated:
                    part = part.add() if not len(part) or random.random() < 0.3 else random.choice(part)
                else:
                    part.SetInParent()
                message_at_random(part, random, depth + 1)
            continue
        value = _of_kind(field.cpp_type, field.type == field.TYPE_BYTES, random)
        try:
            if field.is_repeated:
                getattr(message, field.name).extend([value] * random.choice((1, 1, 3, 2000)))
            else:
                setattr(message, field.name, value)
        except (ValueError, TypeError):  # beyond the range of the field
            continue


def _of_kind(kind: int, is_bytes: bool, random: Random) -> object:
    integer = random.choice(_NUMBERS) * random.choice((1, -1))
    made: dict[int, Callable[[], object]] = {
        1: lambda: max(-(1 << 31), min(integer, (1 << 31) - 1)),
        2: lambda: max(-(1 << 63), min(integer, (1 << 63) - 1)),
        3: lambda: abs(integer) % (1 << 32),
        4: lambda: random.choice((abs(integer), _LARGEST)),
        5: lambda: random.choice((0.0, -1.0, 1e300, 1e-310, float("nan"), float("inf"))),
        6: lambda: random.choice((0.0, -1.0, 1e30, 1e-40, float("nan"), float("-inf"))),
        7: lambda: random.random() < 0.5,
        8: lambda: random.randrange(5),
        9: lambda: (
            random.choice((b"", b"x", b"\xff" * 32, bytes(5000)))
            if is_bytes
            else random.choice(("", "a", "\x00", "prompt " * 500, "é\u202e", "<|im_end|>", "127.0.0.1:1", "x" * 5000))
        ),
    }
    return made[kind]()


def _changed(value: object, random: Random, values: Sequence[object], chance: float = 0.25) -> object:
    """Return the document with one part replaced, repeated or removed."""
    if isinstance(value, dict) and value and random.random() > chance:
        key = random.choice(list(value))
        if random.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: _changed(value[key], random, values)}
    if isinstance(value, list) and value and random.random() > chance:
        at = random.randrange(len(value))
        if random.random() < 0.2:
            most = max(1, MAX_PARTS // _num_parts(value))
            return value[:at] + value[at : at + 1] * min(random.choice((0, 2, 300)), most) + value[at + 1 :]
        return [*value[:at], _changed(value[at], random, values), *value[at + 1 :]]
    if isinstance(value, str) and value and random.random() < 0.4:
        text = bytes_at_random(value.encode("utf-8", "surrogatepass"), random, most=1 << 14)
        return text.decode("utf-8", "replace")
    if isinstance(value, int) and random.random() < 0.3:
        return value + random.choice((-1, 1, 1 << 31, -(1 << 31)))
    return random.choice(values)


def _num_parts(value: object) -> int:
    """Return the number of values in a document; long strings count once for each 64 characters."""
    waiting, parts = [value], 0
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting += [*part, *part.values()]
        elif isinstance(part, list):
            waiting += part
        parts += 1 + len(part) // 64 if isinstance(part, str | bytes) else 1
    return parts
