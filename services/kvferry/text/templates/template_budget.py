"""The work that one rendering of a chat template may do, counted in units of a few nanoseconds.

A unit is a character that is read or written. Other operations cost as many units as make a unit take at most about 10
ns and 8 bytes of memory; a budget therefore bounds the time and memory of a rendering.
"""

import types

from jinja2 import Undefined
from jinja2.exceptions import SecurityError

from kvferry.core.errors import InvalidRequest

BASE_UNITS = 1 << 20
"""Units of a rendering, in addition to those for its messages and tools."""
UNITS_PER_UNIT = 64
"""Units of a rendering per unit of its messages and tools."""
OUTPUT_UNITS = 16
"""Units per character of the output, which is tokenized later."""
ITEM = 8
"""Units per item of a list or a mapping."""
CALL = 32
"""Units per call of a function, filter or test."""
_LISTS: frozenset[type] = frozenset({list, tuple, range, type({}.keys()), type({}.values()), type({}.items())})
_SCALARS: frozenset[type] = frozenset({int, float, bool, types.NoneType, Undefined})
_MAX_BITS = 1024
_MAX_MESSAGE_CHARS = 500


class Budget:
    """The units left for a rendering."""

    __slots__ = ("_total", "left")

    def __init__(self, units: int) -> None:
        self.left = units
        self._total = units

    def spend(self, units: int) -> None:
        """Take `units` from the budget.

        Raises:
            InvalidRequest: the budget is used up.
        """
        self.left -= units
        if self.left < 0 or units < 0:
            raise InvalidRequest(
                f"the model's chat template does more work for these messages than is allowed ({self._total} units); "
                "send fewer or shorter messages, or correct the template",
                field="messages",
                reason="TEMPLATE_TOO_COSTLY",
            )

    def read(self, value: object) -> int:
        """Take the units for reading a whole value, including nested values, and return their number.

        A list may contain the same list many times; it then counts as often as it would be printed. The units are taken
        before each part is visited, so that the walk itself is bounded.

        Raises:
            InvalidRequest: the budget is used up.
            SecurityError: the value, or a part of it, is not text, a number, a list or a mapping.
        """
        if type(value) is str:
            self.spend(len(value))
            return len(value)
        before, parts = self.left, [value]
        while parts:
            part = parts.pop()
            kind = type(part)
            if kind is str:
                self.left -= len(part)  # type: ignore[arg-type]
            elif kind in _SCALARS:
                self.left -= 2 * ITEM
            elif kind in _LISTS:
                self.spend(2 * ITEM + ITEM * len(part))  # type: ignore[arg-type]
                parts += part  # type: ignore[arg-type]
            elif kind is dict:
                self.spend(2 * ITEM + 2 * ITEM * len(part))  # type: ignore[arg-type]
                parts += part.keys()  # type: ignore[attr-defined]
                parts += part.values()  # type: ignore[attr-defined]
            else:
                raise SecurityError(f"a {kind.__name__} cannot be used as a value")
        self.spend(0)
        return before - self.left


def message_of(error: Exception) -> str:
    """Return the message of an error that a template caused; it may contain any text."""
    return str(error)[:_MAX_MESSAGE_CHARS] or type(error).__name__


def limited(value: object) -> object:
    """Return `value`, unless it is an integer that is too long to compute with.

    Raises:
        SecurityError: the integer has more than 1,024 bits.
    """
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise SecurityError(f"an integer has more than {_MAX_BITS} bits")
    return value


def size_of(messages: object) -> int:
    """Return the units that reading a conversation takes, without a limit."""
    unlimited = Budget(1 << 62)
    return unlimited.read(messages)
