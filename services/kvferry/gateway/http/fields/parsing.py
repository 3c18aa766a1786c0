"""Reads a JSON body into a model: each field is implemented, accepted at values without effect, or refused by name."""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.gateway.http.fields.bounds import shown
from kvferry.gateway.http.fields.strict import Accepted, Strict, is_no_op

S = TypeVar("S", bound=Strict)
_NUMBER = re.compile(r"\d+")


def json_object(body: bytes) -> dict[str, Any]:
    """Parse a body that is one JSON object.

    Raises:
        InvalidRequest: the body is not JSON, or not an object.
    """
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}", reason="INVALID_JSON") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    return fields


def parse_fields(kind: type[S], fields: dict[str, Any]) -> S:
    """Validate the fields of a body.

    Args:
        kind: type of the body.
        fields: the JSON object.

    Raises:
        InvalidRequest: a field is invalid, unknown or not supported; the error describes the most specific one.
    """
    for name in fields.keys() & kind.NO_OPS.keys():
        if not is_no_op(fields[name], kind.NO_OPS[name]):
            raise _not_implemented(name, kind.NO_OPS[name])
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(kind, error.errors(include_url=False, include_context=False)) from None


def _not_implemented(field: str, accepted: tuple[object, ...]) -> InvalidRequest:
    remedy = " or ".join(map(json.dumps, accepted[1:])) or "null"
    return InvalidRequest(f"{field} is not supported; leave it out or set it to {remedy}", field=field)


def _refusal(kind: type[Strict], errors: list[ErrorDetails]) -> InvalidRequest:
    # A union reports an error per alternative; the error deepest in the value is the most specific.
    names, no_ops = _names(kind)
    first = errors[0]
    same = [error for error in errors if error["loc"][:1] == first["loc"][:1]]
    worst = max(same, key=lambda error: (len(error["loc"]), [part for part in error["loc"] if isinstance(part, int)]))
    unknown = worst["type"] == "extra_forbidden"
    # Locations include the names of union alternatives, which are meaningless to clients.
    *outer, last = worst["loc"] or ("",)
    path = [part for part in outer if isinstance(part, int) or part in names]
    path += [last] if unknown or isinstance(last, int) or last in names else []
    field = ".".join(shortened(str(part)) for part in path)
    if unknown and outer and isinstance(last, str) and last in no_ops:
        return _not_implemented(field, no_ops[last])
    if unknown:
        return InvalidRequest(f"{field} is an unknown field; leave it out", field=field)
    if worst["type"] == "missing":
        return InvalidRequest(f"{field} is missing", field=field)
    if worst["type"] == "too_short":
        return InvalidRequest(f"{field} is empty; send at least one item", field=field)
    if worst["type"] == "string_too_long":
        most = _NUMBER.findall(worst["msg"])[0]
        return InvalidRequest(f"{field} has {len(worst['input'])} characters; at most {most} are accepted", field=field)
    expected = _expectation(worst["msg"])
    for error in same:  # a fixed value beside another type, such as `bool | Literal["never"]`
        if error is not worst and error["type"] == "literal_error" and error["loc"][:-1] == worst["loc"][:-1]:
            expected += f" or {_expectation(error['msg']).removeprefix(' must be ')}"
    given = worst["input"]
    is_choice = worst["type"] == "literal_error" and isinstance(given, str)  # contains no text of a prompt
    value = repr(shortened(given)) if is_choice else shown(given)
    return InvalidRequest(f"{field}{expected}, not {value}", field=field)


def _expectation(message: str) -> str:
    """Convert pydantic's message about a value, such as `Input should be a valid integer, got a number with a
    fractional part`, to ` must be a valid integer`."""
    text = message.split(", got ")[0].split(", unable ")[0]
    return text.replace("Input should", " must", 1) if text.startswith("Input should") else f": {text.lower()}"


@functools.cache
def _names(kind: type[BaseModel]) -> tuple[frozenset[str], Accepted]:
    """Return the names of all fields of a model and of its nested models, and the `NO_OPS` of the nested models."""
    models = {kind}
    open_models = [kind]
    while open_models:
        for info in open_models.pop().model_fields.values():
            inner = set(_models_of(info.annotation)) - models
            models |= inner
            open_models += inner
    names = {info.alias or name for model in models for name, info in model.model_fields.items()}
    inner_kinds = [model for model in models if issubclass(model, Strict) and model is not kind]
    return frozenset(names), {name: values for model in inner_kinds for name, values in model.NO_OPS.items()}


def _models_of(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_of(part)
