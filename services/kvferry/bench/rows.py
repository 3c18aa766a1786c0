"""Converts measurements to rows of JSON and CSV files."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_DIGITS = 4


def as_row(measured: "DataclassInstance") -> dict[str, object]:
    """Convert a dataclass to a dictionary of its fields; round floats to four decimal places."""
    return {name: _rounded(value) for name, value in asdict(measured).items()}


def append_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Append rows to a CSV file; write a header line if the file is new.

    Args:
        path: path of the file.
        rows: at least one row; all must have the same columns.

    Raises:
        ValueError: the file has different columns.
    """
    columns = list(rows[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    if not is_new:
        with path.open(newline="", encoding="utf-8") as file:
            if next(csv.reader(file), None) != columns:
                raise ValueError(f"{path} must have the columns {','.join(columns)}; use a new file")
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, _DIGITS) if isinstance(value, float) else value
