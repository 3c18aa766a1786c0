"""The work that one rendering of a chat template may do, and the costs of its operations.

Work is counted in units of a few nanoseconds. A unit is a character that is read or written. Other operations cost as
many units as make a unit take at most about 10 ns and 8 bytes of memory; a budget therefore bounds the time and memory
of a rendering. The cost of a text method, a filter, arithmetic or formatting is taken from the budget before it runs,
with the size of its result where that may exceed the size of its arguments. Templates cannot use operations that are
not listed here.
"""

import re
import types
from collections.abc import Callable

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
Cost = Callable[..., None]
_MAX_WIDTH = 1000
_FIELD_CHARS = 2 * _MAX_WIDTH
_LONG_NUMBER = re.compile(r"\*|\d{4}")
_NESTED_FIELD = re.compile(r"\{[^{}]*\{")
_MAX_PRECISION = 20
_SORTING = 24
_OF_KIND = ("boolean", "callable", "defined", "false", "filter", "float", "integer", "iterable", "mapping", "none")


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


def width_of(value: object) -> int:
    """Return a width or count from a template; 0 for a value that is not a number.

    Raises:
        SecurityError: the integer is too long.
    """
    limited(value)
    return max(0, value) if isinstance(value, int) else 0


def number(value: object) -> None:
    """Check that an operand is a number.

    Raises:
        SecurityError: the operand is not a number.
    """
    if not isinstance(value, int | float):
        raise SecurityError(f"an operand must be a number, not a {type(value).__name__}")


def is_plain(value: object) -> bool:
    """Return whether a value may be a key: hashing it takes constant time, or time proportional to a string's
    length."""
    return value is None or isinstance(value, str | int | float | bool | Undefined)


def multiply(budget: Budget, left: object, right: object) -> None:
    for sized, times in ((left, right), (right, left)):
        if isinstance(sized, str | list | tuple):
            budget.spend(len(sized) * width_of(times) * (1 if isinstance(sized, str) else ITEM))


def add(budget: Budget, left: object, right: object) -> None:
    for part in (left, right):
        if isinstance(part, str):
            budget.spend(len(part))
        elif isinstance(part, list | tuple):
            budget.spend(ITEM * len(part))


def remainder(budget: Budget, left: object, right: object) -> None:
    if isinstance(left, str):
        formatted(budget, left, left.count("%"), right)


def format_text(budget: Budget, template: str, *args: object, **kwargs: object) -> None:
    """Charge for `template.format(...)`.

    Args:
        budget: budget of the rendering.
        template: the format string.
        args: positional arguments.
        kwargs: keyword arguments.

    Raises:
        SecurityError: a replacement field is nested in another, or a width or precision has four digits or is
            variable.
    """
    if _NESTED_FIELD.search(template):
        raise SecurityError("replacement fields nested in a format string are not supported")
    formatted(budget, template, template.count("{"), args, kwargs)


def formatted(budget: Budget, template: str, fields: int, *values: object) -> None:
    """Charge for a formatted string; each of its fields may be as long as all values together, or as its width.

    Args:
        budget: the budget of the rendering.
        template: the format string.
        fields: maximum number of its fields.
        values: the values to format.

    Raises:
        SecurityError: a width or precision has four digits, or is variable.
    """
    if _LONG_NUMBER.search(template):
        raise SecurityError("a format string with a number of four digits, or with a variable width, is not supported")
    text = sum(map(budget.read, values))
    budget.spend(len(template) + fields * (_FIELD_CHARS + ITEM * text))


def compare(budget: Budget, operation: str, left: object, right: object) -> None:
    if operation in ("in", "notin"):
        budget.read(left)
        if not isinstance(right, dict):
            budget.read(right)
    elif isinstance(left, str) and isinstance(right, str):
        budget.spend(min(len(left), len(right)))
    elif not (is_plain(left) or is_plain(right)):
        budget.read(left)
        budget.read(right)


def cut(budget: Budget, value: object, *ends: object) -> None:
    if isinstance(value, str | list | tuple):
        num = len(range(*slice(*ends).indices(len(value))))
        budget.spend(num * (1 if isinstance(value, str) else ITEM))


# ---------------------------------------------------------------------- methods and filters, with the value first


def _constant(budget: Budget, value: object, *args: object, **kwargs: object) -> None:
    pass


def _copy(budget: Budget, value: object, *args: object, **kwargs: object) -> None:
    """Charge for a list of the value's items, or of its characters."""
    if hasattr(value, "__len__"):
        budget.spend(3 * ITEM * len(value))


def _reading(times: int) -> Cost:
    def cost(budget: Budget, value: object, *args: object, **kwargs: object) -> None:
        size = budget.read(value)
        for argument in (*args, *kwargs.values()):
            size += budget.read(argument)
        budget.spend((times - 1) * size)

    return cost


def text_of(budget: Budget, value: object) -> None:
    """Charge for the text of a value; if the value is not a string, each of its characters may be escaped.

    Args:
        budget: budget of the rendering.
        value: the value.
    """
    size = budget.read(value)
    budget.spend(0 if isinstance(value, str) else ITEM * size)


def _padding(budget: Budget, value: object, width: object = 80, fill: object = "") -> None:
    budget.spend(budget.read(value) + 4 * width_of(width))


def _tabs(budget: Budget, value: str, tabsize: object = 8) -> None:
    budget.spend(len(value) * (1 + width_of(tabsize)))


def _stripping(budget: Budget, value: object, chars: object = None) -> None:
    budget.spend(budget.read(value) * (1 + (len(chars) if isinstance(chars, str) else 0)))


def _search_backwards(budget: Budget, value: str, part: object, *args: object) -> None:
    budget.spend(len(value) * (1 + (len(part) if isinstance(part, str) else 0)))


def _replacing(budget: Budget, value: object, old: object, new: object, count: object = None) -> None:
    """Charge for at most one `new` for each `old`; for an empty `old`, for one around each character."""
    size = budget.read(value)
    old_size, new_size = budget.read(old), budget.read(new)
    text_size = ITEM * size if not isinstance(value, str) else size
    budget.spend(text_size + (text_size // max(1, old_size) + 1) * new_size)


def _splitting(budget: Budget, value: str, sep: object = None, maxsplit: object = -1) -> None:
    num = value.count(sep) if isinstance(sep, str) and sep else len(value) // 2
    budget.spend(2 * len(value) + 2 * ITEM * (num + 1))


def _splitting_backwards(budget: Budget, value: str, sep: object = None, maxsplit: object = -1) -> None:
    _splitting(budget, value, sep)
    _search_backwards(budget, value, sep)


def _lines(budget: Budget, value: str, keepends: object = False) -> None:
    budget.spend((1 + ITEM) * len(value))


def _join_by(budget: Budget, separator: str, values: object) -> None:
    _join(budget, values, separator)


def _join(budget: Budget, values: object, d: object = "", attribute: object = None) -> None:
    size = budget.read(values)
    num = len(values) if hasattr(values, "__len__") else 0
    budget.spend(ITEM * size + num * (budget.read(d) + 2 * ITEM))
    _each(budget, values, attribute)


def _to_json(
    budget: Budget,
    value: object,
    ensure_ascii: object = False,
    indent: object = None,
    separators: object = None,
    sort_keys: object = False,
) -> None:
    if not (indent is None or isinstance(indent, int)) or width_of(indent) > 64:
        raise SecurityError("an indent must be an integer of at most 64")
    if separators is not None:
        parts = separators if isinstance(separators, list | tuple) else ()
        if len(parts) != 2 or not all(isinstance(part, str) and len(part) <= 8 for part in parts):
            raise SecurityError("separators must be two strings of at most 8 characters")
    size = budget.read(value)
    budget.spend(ITEM * size * (1 + width_of(indent) * _depth(value)))


def _depth(value: object) -> int:
    """Return the nesting depth of a value. `Budget.read` must have counted the value before, which bounds this walk."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            item
            for part in level
            if isinstance(part, dict | list | tuple)
            for item in (part.values() if isinstance(part, dict) else part)
        ]
    return depth


def _indent(budget: Budget, value: str, width: object = 4, first: object = False, blank: object = False) -> None:
    by = len(width) if isinstance(width, str) else width_of(width)
    budget.spend(len(value) * (2 + by) + by)


def _round(budget: Budget, value: object, precision: object = 0, method: object = "common") -> None:
    number(value)
    if not isinstance(precision, int) or abs(precision) > _MAX_PRECISION:
        raise SecurityError(f"a precision must be at most {_MAX_PRECISION}")


def _arithmetic(budget: Budget, value: object, *others: object) -> None:
    """Check the operands of a test that computes a remainder; applied to a string, `%` would format it."""
    for part in (value, *others):
        number(part)


def _percent(budget: Budget, value: str, *args: object, **kwargs: object) -> None:
    formatted(budget, str(value), str(value).count("%"), args, kwargs)


def _sorting(budget: Budget, value: object, *args: object, **kwargs: object) -> None:
    budget.spend(_SORTING * budget.read(value))
    _each(budget, value, *args, **kwargs)


def _each(budget: Budget, value: object, *args: object, **kwargs: object) -> None:
    """Charge for a result per item. An attribute name is a path, which is followed for each item."""
    each = 3 * ITEM + sum(len(name) for name in (*args, *kwargs.values()) if isinstance(name, str))
    if hasattr(value, "__len__"):
        budget.spend(each * len(value))


def _pairs(budget: Budget, *values: object, **named: object) -> None:
    """Charge for `dict(...)` or `namespace(...)`; only keyword arguments and mappings are supported."""
    for value in values:
        if not isinstance(value, dict):
            raise SecurityError("dict() and namespace() support only mappings and keyword arguments")
        budget.spend(3 * ITEM * len(value))
    budget.spend(3 * ITEM * len(named))


pairs: Cost = _pairs
read_all = _reading(1)

TEXT_METHODS: dict[str, Cost] = {
    **dict.fromkeys(("lower", "upper", "title", "capitalize", "casefold", "swapcase"), _reading(4)),
    **dict.fromkeys(("startswith", "endswith", "find", "index", "count", "removeprefix", "removesuffix"), _reading(2)),
    **dict.fromkeys(("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "islower", "isnumeric"), _reading(1)),
    **dict.fromkeys(("isspace", "istitle", "isupper", "isidentifier", "isprintable"), _reading(1)),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padding),
    **dict.fromkeys(("strip", "lstrip", "rstrip"), _stripping),
    **dict.fromkeys(("rfind", "rindex", "rpartition"), _search_backwards),
    "expandtabs": _tabs,
    "join": _join_by,
    "partition": _reading(2),
    "replace": _replacing,
    "rsplit": _splitting_backwards,
    "split": _splitting,
    "splitlines": _lines,
}
MAPPING_METHODS: dict[str, Cost] = {
    "copy": _copy,
    "get": lambda budget, value, key, default=None: read_all(budget, key),
    **dict.fromkeys(("items", "keys", "values"), _constant),
}
LIST_METHODS: dict[str, Cost] = {"copy": _copy, "count": _reading(1), "index": _reading(1)}

FILTERS: dict[str, Cost] = {
    **dict.fromkeys(("abs", "count", "d", "default", "first", "last", "length"), _constant),
    **dict.fromkeys(("items", "list", "reverse"), _copy),
    **dict.fromkeys(("map", "reject", "rejectattr", "select", "selectattr"), _each),
    **dict.fromkeys(("capitalize", "e", "escape", "float", "int", "lower", "title", "upper"), _reading(12)),
    **dict.fromkeys(("safe", "string"), text_of),
    **dict.fromkeys(("dictsort", "max", "min", "sort", "unique"), _sorting),
    "center": _padding,
    "format": _percent,
    "indent": _indent,
    "join": _join,
    "replace": _replacing,
    "round": _round,
    "tojson": _to_json,
    "trim": _stripping,
}
TESTS: dict[str, Cost] = {
    **dict.fromkeys((*_OF_KIND, "number", "sameas", "sequence", "string", "test", "true", "undefined"), _constant),
    **dict.fromkeys(("divisibleby", "even", "odd"), _arithmetic),
    **dict.fromkeys(("lower", "upper"), _reading(4)),
    **{
        name: lambda budget, left, right, _operation=operation: compare(budget, _operation, left, right)
        for operation, names in {
            "eq": ("==", "eq", "equalto"),
            "ne": ("!=", "ne"),
            "lt": ("<", "lt", "lessthan"),
            "lteq": ("<=", "le"),
            "gt": (">", "gt", "greaterthan"),
            "gteq": (">=", "ge"),
            "in": ("in",),
        }.items()
        for name in names
    },
}
