"""Quantities of Kubernetes, such as `500m`, `2` or `8Gi`: notation and value."""

import re
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

_NOTATION = re.compile(r"[+-]?([0-9]+([.][0-9]*)?|[.][0-9]+)(([KMGTPE]i|[numkMGTPE])|[eE][+-]?[0-9]{1,3})?")

_AMOUNTS = frozenset({"requests", "limits"})


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


def canonical(value: Any) -> Any:
    """Return JSON with one notation for each value: quantities as decimal numbers, and whole numbers as integers.

    Quantities stand in `requests` and `limits` of `resources`, and in `sizeLimit` of volumes.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [canonical(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    return {name: _canonical_field(name, part) for name, part in value.items()}


def _canonical_field(name: str, part: Any) -> Any:
    if name == "resources" and isinstance(part, dict):
        return {kind: _amounts(found) if kind in _AMOUNTS else canonical(found) for kind, found in part.items()}
    return amount(part) if name == "sizeLimit" else canonical(part)


def _amounts(quantities: Any) -> Any:
    if not isinstance(quantities, dict):
        return canonical(quantities)
    return {resource: amount(quantity) for resource, quantity in quantities.items()}
