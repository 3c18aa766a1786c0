"""OpenAI's embeddings: one vector for each input, as numbers or as base64 of little-endian float32."""

import asyncio
import base64
from typing import Annotated, ClassVar, Generic, Literal, TypeVar

import numpy as np
from msgspec import Raw, Struct
from pydantic import PlainValidator

from kvferry.core.errors import InvalidRequest
from kvferry.gateway.http.encoding.bodies import (
    Answered,
    Items,
    VectorBody,
    check_count,
    check_texts,
    is_ids,
    parse,
)
from kvferry.gateway.http.encoding.vectors import (
    VectorInputs,
    VectorUsage,
    compute_vectors,
    names_of,
    read_inputs,
    usage_of,
)
from kvferry.gateway.http.fields import field_policy
from kvferry.gateway.http.fields.field_policy import Rules
from kvferry.gateway.http.fields.strict import shown
from kvferry.gateway.http.openai.reply import encode
from kvferry.serving.embedding import MAX_INPUTS, Input
from kvferry.serving.request import Caller
from kvferry.serving.text_model import TextModel
from kvferry.serving.text_service import TextService
from kvferry.serving.token_source import Vector

_Inputs = str | Items[int] | Items[str] | Items[list[int]]
_VECTORS_AT_ONCE = 32
"""Number of vectors that are encoded as JSON before other tasks may run."""


def check_input(value: object) -> list[Input]:
    """Check the inputs of a request: a string, a list of token ids, or a list of either; return them as a list.

    Raises:
        InvalidRequest: the value is none of these; the error names the first wrong item.
    """
    if isinstance(value, str) or not isinstance(value, list):
        return list(check_texts("input", value, MAX_INPUTS))
    if value and is_ids(value):
        return [value]
    check_count("input", value, MAX_INPUTS)
    if not isinstance(value[0], list):
        return list(check_texts("input", value, MAX_INPUTS))
    for number, ids in enumerate(value):
        if not is_ids(ids):
            where = f"input.{number}"
            raise InvalidRequest(f"{where} must be a list of token ids, not {shown(ids)}", field=where)
    return value


E = TypeVar("E")


class EmbeddingObject(Struct):
    """The vector of one input: numbers, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(Struct, Generic[E]):
    """Response of POST /v1/embeddings."""

    data: list[E]
    model: str
    usage: VectorUsage
    object: str = "list"


class EmbeddingsBody(VectorBody):
    """Body of POST /v1/embeddings."""

    RULES: ClassVar[Rules] = field_policy.EMBEDDINGS

    input: Annotated[
        list[Input],
        PlainValidator(check_input, json_schema_input_type=_Inputs),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    normalize: bool = True
    """kvferry-specific extension: whether vectors have an L2 norm of 1."""


def read_embeddings(
    model: TextModel, body: bytes, context_tokens: int, *, is_strict: bool
) -> tuple[VectorInputs, bool, tuple[str, ...]]:
    """Parse a body and tokenize its inputs; return them, whether vectors are requested as base64, and the names of the
    fields without effect.

    Args:
        model: the served model.
        body: JSON body of the request.
        context_tokens: maximum number of tokens of one input.
        is_strict: whether unknown fields are refused.

    Raises:
        InvalidRequest, UnknownModel: the request is invalid or cannot be served by this gateway.
    """
    request = parse(EmbeddingsBody, model, body, is_strict=is_strict)
    names = names_of("input", len(request.input))
    inputs = read_inputs(
        model, request, request.input, names, context_tokens, normalize=request.normalize, dimensions=request.dimensions
    )
    return inputs, request.encoding_format == "base64", request.ignored


async def answer_embeddings(service: TextService, caller: Caller, body: bytes, *, is_strict: bool) -> Answered:
    """Answer POST /v1/embeddings.

    Raises:
        KvferryError: the request is invalid, or could not be computed.
    """
    inputs, is_base64, ignored = await service.read(
        caller.client, read_embeddings, len(body), body, service.served_tokens, is_strict=is_strict
    )
    vectors = await compute_vectors(service, caller, inputs, "input")
    data: list[Raw] = []
    for index, vector in enumerate(vectors):
        if index % _VECTORS_AT_ONCE == _VECTORS_AT_ONCE - 1:
            await asyncio.sleep(0)
        value = _as_base64(vector) if is_base64 else vector.values.tolist()
        data.append(Raw(encode(EmbeddingObject(index, value))))
    return encode(EmbeddingList(data, service.model.name, usage_of(vectors))), ignored


def _as_base64(vector: Vector) -> str:
    return base64.b64encode(vector.values.astype(np.dtype("<f4")).tobytes()).decode("ascii")
