"""Parameters of a request's query, each of which is given once."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.datastructures import QueryParams

from kvferry.core.errors import InvalidRequest, shortened

_NUMBERS, _FLAGS = ("limit", "starting_after"), ("stream", "include_obfuscation")
"""Parameters that are numbers, and those that are true or false."""


def single_fields(params: QueryParams, left_out: Sequence[str] = ()) -> dict[str, str]:
    """Return the parameters of a query.

    Args:
        params: the query.
        left_out: parameters without effect, which may be given several times.

    Raises:
        InvalidRequest: a parameter is given twice, so that it is unknown which one is meant.
    """
    given: dict[str, str] = {}
    for name, value in params.multi_items():
        if name in given:
            raise InvalidRequest(f"{shortened(name)!r} is given twice; give it once", field=shortened(name))
        if name not in left_out:
            given[name] = value
    return given


def query_fields(params: QueryParams, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return the parameters of a query, with numbers converted to integers, and truth values to bool.

    Args:
        params: the query.
        left_out: parameters without effect, which may be given several times.

    Raises:
        InvalidRequest: a parameter is given twice.
    """
    found: dict[str, Any] = dict(single_fields(params, left_out))
    for name, value in found.items():
        if name in _NUMBERS and value.isascii() and value.isdecimal() and len(value) < 10:
            found[name] = int(value)
        elif name in _FLAGS and value in ("true", "false"):
            found[name] = value == "true"
    return found


def known(given: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    """Return the fields of a request of the admin API.

    Args:
        given: fields of its query or body.
        names: fields that it may have.

    Raises:
        InvalidRequest: there is another field.
    """
    for name in given:
        if name not in names:
            raise InvalidRequest(
                f"{shortened(name)!r} is not a field of this request; remove it", field=shortened(name)
            )
    return given
