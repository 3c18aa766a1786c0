"""The fields that bodies of these routes share, and checks of their inputs."""

from collections.abc import Sequence
from typing import Annotated, TypeVar

from pydantic import Field

from kvferry.core.errors import InvalidRequest, UnknownModel
from kvferry.core.inference.pooling import Pooling, PoolingParams, pooling_named
from kvferry.core.limits import MAX_CACHE_SALT_CHARS
from kvferry.gateway.http.fields.strict import Priority, Strict, json_object, parse_fields, shown
from kvferry.serving import prompts
from kvferry.serving.text_model import TextModel

Ids = list[int]
T = TypeVar("T")
Items = Annotated[list[T], Field(min_length=1)]
"""A non-empty list, for the description of a field."""


class Body(Strict):
    """Fields of every body."""

    model: str | None = None
    """Model name; `None` selects the served model."""


class VectorBody(Body):
    """Fields of every body for which vectors are computed."""

    pooling: str | None = None
    """kvferry-specific extension: `last`, `mean` or `cls`."""
    priority: Priority = 0
    """Extension, named as in vLLM: priority of the request; lower numbers come first."""
    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    """Extension, named as in vLLM: requests with unequal salts share no KV."""

    def params(self, *, normalize: bool = True, dimensions: int | None = None) -> PoolingParams:
        """Return the parameters of the vectors.

        Args:
            normalize: whether vectors have an L2 norm of 1.
            dimensions: number of leading values to keep; `None` for all.

        Raises:
            InvalidRequest: the pooling is unknown.
        """
        pooling = Pooling.LAST if self.pooling is None else pooling_named(self.pooling)
        return PoolingParams(pooling, normalize, dimensions)


B = TypeVar("B", bound=Body)
Answered = tuple[bytes, tuple[str, ...]]
"""The body of a response as JSON, and the names of the request's fields without effect."""


def parse(kind: type[B], model: TextModel, body: bytes, *, is_strict: bool) -> B:
    """Parse and validate a body.

    Args:
        kind: type of the body.
        model: the served model.
        body: JSON text in UTF-8.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest: a field is invalid or refused; the error names the first such field.
        UnknownModel: a different model is requested.
    """
    made = parse_fields(kind, json_object(body), is_strict=is_strict)
    if made.model == "":
        raise UnknownModel(f"model '' is not served here; use {model.name!r}", field="model")
    prompts.check_model(model, made.model or "")
    return made


def check_texts(name: str, value: object, limit: int) -> list[str]:
    """Check a string or a list of strings; return a list.

    Args:
        name: name of the field, for error messages.
        value: its value.
        limit: maximum number of strings.

    Raises:
        InvalidRequest: the value is neither, or has more than `limit` strings.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise InvalidRequest(f"{name} must be a string or a list of strings, not {shown(value)}", field=name)
    check_count(name, texts, limit)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            where = f"{name}.{number}"
            raise InvalidRequest(f"{where} must be a string, not {shown(text)}", field=where)
    return texts


def check_count(name: str, items: Sequence[object], limit: int) -> None:
    """Check the number of items of a list.

    Raises:
        InvalidRequest: there are no items, or more than `limit`.
    """
    if not 1 <= len(items) <= limit:
        raise InvalidRequest(f"{name} has {len(items)} items; it must have 1 to {limit}", field=name)


def is_ids(value: object) -> bool:
    """Return whether a value is a list of integers; booleans do not count as integers."""
    return isinstance(value, list) and set(map(type, value)) <= {int}
