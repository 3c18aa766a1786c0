"""Quantities of Kubernetes, such as `500m`, `2` or `8Gi`: notation and value."""

import re
from decimal import Decimal

from kubernetes.utils.quantity import parse_quantity

_NOTATION = re.compile(r"[+-]?([0-9]+([.][0-9]*)?|[.][0-9]+)(([KMGTPE]i|[numkMGTPE])|[eE][+-]?[0-9]{1,3})?")


def is_quantity(value: object) -> bool:
    """Return whether `value` is text in the notation of quantities."""
    return isinstance(value, str) and _NOTATION.fullmatch(value) is not None


def amount(quantity: object) -> str:
    """Return the value of a quantity in one notation, a decimal number; text of another notation is returned
    unchanged."""
    if isinstance(quantity, bool) or not (isinstance(quantity, int | float) or is_quantity(quantity)):
        return str(quantity)
    value = Decimal(parse_quantity(str(quantity)))  # type: ignore[no-untyped-call]
    return f"{value.normalize():f}" if value else "0"
