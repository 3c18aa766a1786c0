"""Kinds of values of settings: how each is parsed from text, named in help and written back.

Parsing raises ValueError, whose message states the accepted values.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvferry.core.addresses import split_address

T = TypeVar("T")

_HOST = re.compile(r"[a-z0-9_]([-a-z0-9_.]{0,251}[a-z0-9_])?|[0-9a-f:.]+")

_UNITS = {  # `Ki` is the notation of Kubernetes
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


@dataclass(frozen=True, slots=True)
class Parser(Generic[T]):
    """A kind of values of settings. Called with text, it returns the value or raises ValueError."""

    metavar: str
    """Name of the kind or of its unit in help, such as BYTES or HOST:PORT."""
    parse: Callable[[str], T]
    show: Callable[[T], str] = str
    """Returns the text of a value, from which `parse` makes the same value."""

    def __call__(self, text: str) -> T:
        return self.parse(text)


def whole(low: int, high: int) -> Parser[int]:
    """Return a parser for integers from `low` to `high`; it raises ValueError for any other text."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"must be a whole number from {low} to {high}") from None
        if not low <= number <= high:
            raise ValueError(f"must be between {low} and {high}")
        return number

    return Parser("N", parse)


def seconds(low: float, high: float) -> Parser[float]:
    """Return a parser for durations from `low` to `high` seconds; it raises ValueError for any other text."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise ValueError(f"must be a number of seconds from {low:g} to {high:g}") from None
        if not low <= number <= high:  # also rejects NaN
            raise ValueError(f"must be between {low:g} and {high:g} seconds")
        return number

    return Parser("SECONDS", parse, lambda number: f"{number:.15g}")


def whole_or_auto(low: int, high: int) -> Parser[int | str]:
    """Return a parser of whole numbers from `low` to `high`, or `auto`."""
    of_numbers = whole(low, high)

    def parse(text: str) -> int | str:
        return "auto" if text.strip().lower() == "auto" else of_numbers(text)

    return Parser("N|auto", parse)


def size_text(size: int) -> str:
    """Return a size in bytes as text in the largest binary unit of which it is a multiple, such as `64MiB`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _UNITS[unit.lower()] == 0:
            return f"{size // _UNITS[unit.lower()]}{unit}"
    return str(size)


def _size_bytes(text: str) -> int:
    stripped = text.strip()
    digits = stripped.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = stripped[len(digits) :].strip().lower()
    if unit not in _UNITS:
        raise ValueError(f"unknown unit {unit!r}; use KiB, MiB, GiB or TiB")
    try:
        # Digits alone are exact; a double would round sizes from 8 PiB.
        number = int(digits) * _UNITS[unit] if digits.isdecimal() else int(float(digits) * _UNITS[unit])
    except (ValueError, OverflowError):
        raise ValueError("must be a number with a unit, such as 512MiB or 4GiB") from None
    if number <= 0:
        raise ValueError("must be greater than 0")
    return number


size_bytes = Parser("BYTES", _size_bytes, size_text)
"""Sizes in bytes, for example `512MiB`, `2GiB`, `2G` or `1000000`. Units without a B are powers of 1024, as for Docker
and Java."""


def _size_or_auto(text: str) -> int:
    return 0 if text.strip().lower() in ("auto", "0") else size_bytes(text)


size_or_auto = Parser("BYTES|auto", _size_or_auto, lambda size: size_text(size) if size else "auto")
"""Sizes in bytes, or `auto`, which is 0."""


def share(*, may_be_zero: bool = False) -> Parser[float]:
    """Return a parser for shares: numbers up to 1 that are greater than 0, or at least 0 if `may_be_zero`. It raises
    ValueError for any other text."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 <= number <= 1 or (number == 0 and not may_be_zero):  # also rejects NaN
            raise ValueError(f"must be {'between 0 and 1' if may_be_zero else 'greater than 0 and at most 1'}")
        return number

    return Parser("SHARE", parse, lambda number: f"{number:.15g}")


def _device_name(text: str) -> str:
    name, colon, number = text.partition(":")
    if text in ("auto", "cpu", "cuda") or (name == "cuda" and colon and number.isdecimal() and len(number) < 4):
        return text
    raise ValueError("must be auto, cpu, cuda or cuda:N, for example cuda:1")


device_name = Parser("DEVICE", _device_name)
"""Devices: `auto`, `cpu`, `cuda` or `cuda:N`."""


def _host_name(text: str) -> str:
    host = text.strip().strip("[]").lower()
    if not _HOST.fullmatch(host) or (":" in host and host.count(":") < 2):
        raise ValueError("must be a host without scheme and port, for example llm.example.com")
    return host


host_name = Parser("HOST", _host_name)
"""Host names or IP addresses, without scheme and port."""


def _boolean(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in {"1", "true", "yes", "on"}:
        return True
    if lowered in {"0", "false", "no", "off"}:
        return False
    raise ValueError("must be true or false")


boolean = Parser("BOOL", _boolean, lambda value: str(value).lower())
"""`true` or `false` in their usual spellings."""


def _address(text: str) -> str:
    if text:
        split_address(text)
    return text


TEXT = Parser("TEXT", str)
NAME = Parser("NAME", str)
NAME_AND_PATH = Parser("NAME=PATH", str)
ADDRESS = Parser("HOST:PORT", _address)
"""Addresses on which a process listens; empty for none."""
ENDPOINT = Parser("HOST:PORT[/ADMIN_PORT]", str)
MODEL_SERVER = Parser("HOST:PORT[/METRICS_PORT]", str)
FILE = Parser("FILE", str)
FOLDER = Parser("FOLDER", str)
URL = Parser("URL", str)
MODEL_NAME = Parser("MODEL", str)
"""A known name, a name on the Hugging Face Hub, or a path."""
