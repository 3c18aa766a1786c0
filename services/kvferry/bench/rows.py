"""Measured values as plain rows, for files of JSON and CSV."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_DIGITS = 4


def as_row(measured: "DataclassInstance") -> dict[str, object]:
    """A record's fields, those of records within it too; numbers to four digits after the point."""
    return {name: _rounded(value) for name, value in asdict(measured).items()}


def append_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Rows behind those that a file has; under a heading where there is no file yet.

    Args:
        path: of the file.
        rows: at least one; all with the first one's columns.

    Raises:
        ValueError: the file has other columns.
    """
    columns = list(rows[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    if not is_new:
        with path.open(newline="", encoding="utf-8") as file:
            if next(csv.reader(file), None) != columns:
                raise ValueError(f"{path} has other columns than {','.join(columns)}; name another file")
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, _DIGITS) if isinstance(value, float) else value
