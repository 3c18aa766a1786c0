"""Reads a JSON body into a model: each field is implemented, accepted at values without effect, or refused by name."""

import functools
import json
from collections.abc import Iterator
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.gateway.http.fields.strict import Strict
from kvferry.gateway.http.openai.bounds import shown

S = TypeVar("S", bound=Strict)


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
    """Validate the fields of a body. Removes fields of `kind.NO_OPS` from `fields`.

    Raises:
        InvalidRequest: a field is invalid, unknown or not implemented; the error describes the most specific one.
    """
    for name in fields.keys() & kind.NO_OPS.keys():
        accepted, value = kind.NO_OPS[name], fields.pop(name)
        if not any(type(value) is type(no_op) and value == no_op for no_op in accepted):
            remedy = f"or send {' or '.join(map(json.dumps, accepted[1:]))}" if len(accepted) > 1 else "or send null"
            raise InvalidRequest(f"{name} is not implemented here; leave it out {remedy}", field=name)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(kind, error.errors(include_url=False, include_context=False)) from None


def without_no_ops(kind: type[Strict], value: object) -> object:
    """Return an object inside of a body without the fields of `kind.NO_OPS` that have an accepted value."""
    if not isinstance(value, dict) or not kind.NO_OPS.keys() & value.keys():
        return value
    return {name: item for name, item in value.items() if item not in kind.NO_OPS.get(name, ())}


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
    if unknown and outer and last in no_ops:
        return InvalidRequest(f"{field} is not implemented here; leave it out", field=field)
    if unknown:
        return InvalidRequest(f"{field} is an unknown field; leave it out", field=field)
    if worst["type"] == "missing":
        return InvalidRequest(f"{field} is missing", field=field)
    if worst["type"] == "too_short":
        return InvalidRequest(f"{field} is empty; give at least one item", field=field)
    return InvalidRequest(
        f"{field}: {worst['msg'].lower().replace('input', 'it', 1)}; it is {shown(worst['input'])}", field=field
    )


@functools.cache
def _names(kind: type[BaseModel]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of all fields of a model and of the models in it, and the names of their `NO_OPS`."""
    models = {kind}
    open_models = [kind]
    while open_models:
        for info in open_models.pop().model_fields.values():
            inner = set(_models_of(info.annotation)) - models
            models |= inner
            open_models += inner
    names = {info.alias or name for model in models for name, info in model.model_fields.items()}
    no_ops = {name for model in models if issubclass(model, Strict) and model is not kind for name in model.NO_OPS}
    return frozenset(names), frozenset(no_ops)


def _models_of(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_of(part)
