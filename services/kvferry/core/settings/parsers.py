"""Parsers of the text of settings. Each raises ValueError, whose message states the accepted values."""

import re
from collections.abc import Callable

_HOST = re.compile(r"[a-z0-9_]([-a-z0-9_.]{0,251}[a-z0-9_])?|[0-9a-f:.]+")

_UNITS = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return a parser for integers from `low` to `high`; it raises ValueError for any other text."""

    def parse(text: str) -> int:
        number = int(text)
        if not low <= number <= high:
            raise ValueError(f"must be between {low} and {high}")
        return number

    return parse


def seconds(low: float, high: float) -> Callable[[str], float]:
    """Return a parser for durations from `low` to `high` seconds; it raises ValueError for any other text."""

    def parse(text: str) -> float:
        number = float(text)
        if not low <= number <= high:  # also rejects NaN
            raise ValueError(f"must be between {low:g} and {high:g} seconds")
        return number

    return parse


def whole_or_auto(low: int, high: int) -> Callable[[str], int | str]:
    """Return a parser of whole numbers from `low` to `high`, or `auto`."""
    parse = whole(low, high)
    return lambda text: "auto" if text.strip().lower() == "auto" else parse(text)


def size_bytes(text: str) -> int:
    """Parse a size in bytes, for example `512MiB`, `2GiB`, `2G` or `1000000`. Units without a B are powers of 1024, as
    for Docker and Java.

    Raises:
        ValueError: the text is invalid; the message states the accepted values.
    """
    stripped = text.strip()
    digits = stripped.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = stripped[len(digits) :].strip().lower()
    if unit not in _UNITS:
        raise ValueError(f"unknown unit {unit!r}; use KiB, MiB or GiB")
    number = int(float(digits) * _UNITS[unit])
    if number <= 0:
        raise ValueError("must be greater than 0")
    return number


def size_or_auto(text: str) -> int:
    """Parse a size in bytes, or `auto`, which is 0."""
    return 0 if text.strip().lower() in ("auto", "0") else size_bytes(text)


def share(*, may_be_zero: bool = False) -> Callable[[str], float]:
    """Return a parser for shares: numbers up to 1 that are greater than 0, or at least 0 if `may_be_zero`. It raises
    ValueError for any other text."""

    def parse(text: str) -> float:
        number = float(text)
        if not 0 <= number <= 1 or (number == 0 and not may_be_zero):  # also rejects NaN
            raise ValueError(f"must be {'between 0 and 1' if may_be_zero else 'greater than 0 and at most 1'}")
        return number

    return parse


def device_name(text: str) -> str:
    """Parse `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        ValueError: the text is invalid; the message states the accepted values.
    """
    name, colon, number = text.partition(":")
    if text in ("auto", "cpu", "cuda") or (name == "cuda" and colon and number.isdecimal() and len(number) < 4):
        return text
    raise ValueError("must be auto, cpu, cuda or cuda:N, for example cuda:1")


def host_name(text: str) -> str:
    """Parse a host name or an IP address, without scheme and port.

    Raises:
        ValueError: the text is invalid; the message states the accepted values.
    """
    host = text.strip().strip("[]").lower()
    if not _HOST.fullmatch(host) or (":" in host and host.count(":") < 2):
        raise ValueError("must be a host without scheme and port, for example llm.example.com")
    return host


def boolean(text: str) -> bool:
    """Parse `true` or `false` in their usual spellings.

    Raises:
        ValueError: the text is invalid; the message states the accepted values.
    """
    lowered = text.strip().lower()
    if lowered in {"1", "true", "yes", "on"}:
        return True
    if lowered in {"0", "false", "no", "off"}:
        return False
    raise ValueError("must be true or false")
