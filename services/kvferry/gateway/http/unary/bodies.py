"""Reads the JSON bodies of these routes: each field is implemented, accepted at values without effect, or refused by
name."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails, from_json

from kvferry.core.errors import InvalidRequest, UnknownModel, shortened
from kvferry.core.hashing import MAX_CACHE_SALT_CHARS
from kvferry.core.sampling import MAX_PRIORITY
from kvferry.gateway.http.fields.messages import Strict
from kvferry.gateway.http.openai_bounds import MAX_FIELDS, shown
from kvferry.model.requests.pooling import Pooling, PoolingParams, pooling_named
from kvferry.rpc.text import prompts
from kvferry.rpc.text.text_model import TextModel

Ids = list[int]


class Body(Strict):
    """Fields of every body."""

    NO_OPS: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Fields that are not implemented, with the values at which they have no effect and are accepted."""

    model: str | None = None
    """Model name; `None` selects the served model."""


class VectorBody(Body):
    """Fields of every body for which vectors are computed."""

    user: str | None = None
    """End user identifier for abuse detection; has no effect on the response."""
    pooling: str | None = None
    """Extension: `last`, `mean` or `cls`."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """Extension, named as in vLLM."""
    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    """Extension, named as in vLLM: requests with unequal salts share no KV."""

    def params(self, *, normalize: bool = True, dimensions: int | None = None) -> PoolingParams:
        """Return the parameters of the vectors.

        Raises:
            InvalidRequest: the pooling is unknown.
        """
        pooling = Pooling.LAST if self.pooling is None else pooling_named(self.pooling)
        return PoolingParams(pooling, normalize, dimensions)


B = TypeVar("B", bound=Body)


def parse(kind: type[B], model: TextModel, body: bytes) -> B:
    """Parse and validate a body.

    Raises:
        InvalidRequest: a field is invalid, unknown or not implemented; the error names the first such field.
        UnknownModel: a different model is requested.
    """
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}", reason="INVALID_JSON") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    if len(fields) > MAX_FIELDS:
        raise InvalidRequest(f"the body has {len(fields)} fields; at most {MAX_FIELDS} are accepted")
    return parse_fields(kind, model, fields)


def parse_fields(kind: type[B], model: TextModel, fields: dict[str, Any]) -> B:
    """Validate the fields of a body; see `parse`."""
    for name in fields.keys() & kind.NO_OPS.keys():
        accepted, value = kind.NO_OPS[name], fields.pop(name)
        if not any(type(value) is type(no_op) and value == no_op for no_op in accepted):
            values = " or ".join(map(json.dumps, accepted))
            raise InvalidRequest(f"{name} is not implemented here; leave it out, or send {values}", field=name)
    try:
        made = kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(kind, error.errors(include_url=False, include_context=False)[0]) from None
    if made.model == "":
        raise UnknownModel(f"model '' is not served here; this is {model.name!r}", field="model")
    prompts.check_model(model, made.model or "")
    return made


def check_texts(name: str, value: object, limit: int) -> list[str]:
    """Check a text or a list of texts; return the list.

    Raises:
        InvalidRequest: it is neither, or has more than `limit` texts.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise InvalidRequest(f"{name} must be a string or a list of strings; it is {shown(value)}", field=name)
    check_count(name, texts, limit)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            where = f"{name}.{number}"
            raise InvalidRequest(f"{where} must be a string; it is {shown(text)}", field=where)
    return texts


def check_count(name: str, items: Sequence[object], limit: int) -> None:
    """Check the number of items of a list.

    Raises:
        InvalidRequest: there are no items, or more than `limit`.
    """
    if not 1 <= len(items) <= limit:
        raise InvalidRequest(f"{name} has {len(items)} items; send 1 to {limit}", field=name)


def is_ids(value: object) -> bool:
    """Return whether a value is a list of integers; booleans are none."""
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _refusal(kind: type[Body], error: ErrorDetails) -> InvalidRequest:
    # Locations also have names of alternatives and of validators, which are meaningless to clients.
    unknown = error["type"] == "extra_forbidden"
    path = [p for p in error["loc"] if isinstance(p, int) or p in kind.model_fields or unknown]
    field = ".".join(shortened(str(part)) for part in path)
    if unknown:
        return InvalidRequest(f"{field} is an unknown field; leave it out", field=field)
    if error["type"] == "missing":
        return InvalidRequest(f"{field} is missing", field=field)
    message = error["msg"].lower().replace("input", "it", 1)
    return InvalidRequest(f"{field}: {message}; it is {shown(error['input'])}", field=field)
