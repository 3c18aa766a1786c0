"""Measured values as plain rows, for files of JSON."""

from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_DIGITS = 4


def as_row(measured: "DataclassInstance") -> dict[str, object]:
    """A record's fields, those of records within it too; numbers to four digits after the point."""
    return {name: _rounded(value) for name, value in asdict(measured).items()}


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, _DIGITS) if isinstance(value, float) else value
