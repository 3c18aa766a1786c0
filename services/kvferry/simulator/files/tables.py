"""Reads typed fields of TOML tables; errors name field, value and remedy."""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from kvferry.core.errors import UsageError, shortened

_BARE_KEY = re.compile("[A-Za-z0-9_-]{1,40}")


class Table:
    """One table of a file. Every field is taken once; `end` rejects the remaining fields."""

    def __init__(self, name: str, fields: object) -> None:
        """
        Args:
            name: dotted name of the table, empty for the file itself.
            fields: the decoded table; anything else is rejected.

        Raises:
            UsageError: `fields` is not a table.
        """
        if not isinstance(fields, Mapping):
            raise wrong(name, fields, f"use a table, [{name}]")
        self.name = name
        self._fields = dict(fields)
        self._known: list[str] = []

    def path(self, field: str) -> str:
        """Return the dotted name of a field."""
        shown = field if _BARE_KEY.fullmatch(field) else shortened(repr(field))
        return f"{self.name}.{shown}" if self.name else shown

    def __contains__(self, field: str) -> bool:
        return field in self._fields

    def number(self, field: str, default: float, low: float, high: float) -> float:
        """Read and remove a number.

        Args:
            field: name of the field.
            default: value if the field is absent; it is checked too.
            low: minimum, inclusive.
            high: maximum, inclusive.

        Raises:
            UsageError: the field has a different type or is out of range.
        """
        value = self._take(field, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise wrong(self.path(field), value, f"use a number from {low:g} to {high:g}")
        return float(value)

    def numbers(self, field: str, count: int, low: float, high: float) -> tuple[float, ...]:
        """Read and remove a list of numbers; an empty one if it is absent.

        Args:
            field: name of the field.
            count: maximum length of the list.
            low: minimum of each number, inclusive.
            high: maximum of each number, inclusive.

        Raises:
            UsageError: the field is not a list of numbers, is too long, or contains a number out of range.
        """
        value = self._take(field, [])
        if not isinstance(value, list) or len(value) > count:
            raise wrong(self.path(field), value, f"use a list of at most {count} numbers")
        for one in value:
            if isinstance(one, bool) or not isinstance(one, int | float) or not low <= one <= high:
                raise wrong(self.path(field), one, f"use numbers from {low:g} to {high:g}")
        return tuple(map(float, value))

    def whole(self, field: str, default: int, low: int, high: int) -> int:
        """Read and remove a whole number.

        Args:
            field: name of the field.
            default: value if the field is absent; it is checked too.
            low: minimum, inclusive.
            high: maximum, inclusive.

        Raises:
            UsageError: the field has a different type or is out of range.
        """
        value = self._take(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise wrong(self.path(field), value, f"use a whole number from {low} to {high}")
        return value

    def text(self, field: str, default: str, choices: Iterable[str] = ()) -> str:
        """Read and remove a string, one of `choices` if there are any; `default` if it is absent.

        Raises:
            UsageError: the field is not a string, or not one of `choices`.
        """
        value = self._take(field, default)
        allowed = tuple(choices)
        if not isinstance(value, str) or (allowed and value not in allowed):
            raise wrong(self.path(field), value, f"use one of {', '.join(allowed)}" if allowed else "use a string")
        return value

    def flag(self, field: str, *, default: bool) -> bool:
        """Read and remove true or false; `default` if it is absent.

        Raises:
            UsageError: the field is not a boolean.
        """
        value = self._take(field, default)
        if not isinstance(value, bool):
            raise wrong(self.path(field), value, "use true or false")
        return value

    def table(self, field: str) -> "Table":
        """Read and remove a table; an empty one if it is absent.

        Raises:
            UsageError: the field is not a table.
        """
        return Table(self.path(field), self._take(field, {}))

    def tables(self, field: str, limit: int) -> "list[Table]":
        """Read and remove a list of at most `limit` tables; an empty list if it is absent.

        Raises:
            UsageError: the field is not a list of tables, or has too many.
        """
        value = self._take(field, [])
        if not isinstance(value, list) or len(value) > limit:
            raise wrong(self.path(field), value, f"use at most {limit} tables, each as [[{self.path(field)}]]")
        return [Table(f"{self.path(field)}.{index}", one) for index, one in enumerate(value)]

    def over(self, base: "Table") -> "Table":
        """Return this table, completed with fields of `base`."""
        return Table(self.name, base._fields | self._fields)

    def end(self) -> None:
        """Check that all fields were taken.

        Raises:
            UsageError: a field is unknown.
        """
        for field, value in self._fields.items():
            if field not in self._known:
                close = [f"write {name}, or " for name in get_close_matches(field, self._known, 1)]
                known = ", ".join(self._known) or "none"
                raise wrong(self.path(field), value, f"{''.join(close)}remove it; the fields here are {known}")

    def _take(self, field: str, default: Any) -> Any:
        self._known.append(field)
        return self._fields.get(field, default)


def wrong(field: str, value: object, remedy: str) -> UsageError:
    """Return the error of an invalid field.

    Args:
        field: path of the field in the file.
        value: its value.
        remedy: the rest of the message, for example `use a string`.
    """
    try:
        shown = shortened(repr(value))
    except (ValueError, RecursionError):  # a number of more than 4,300 digits, or a deeply nested value
        shown = "too large to show"
    return UsageError(f"{field} is {shown}; {remedy}", field=field)
