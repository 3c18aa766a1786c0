"""OpenAI's embeddings: one vector for each input, as numbers or as base64 of little-endian float32."""

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from msgspec import Raw, Struct
from pydantic import PlainValidator

from kvferry.core.errors import InvalidRequest
from kvferry.gateway.http.openai_api import Caller
from kvferry.gateway.http.openai_bounds import shown
from kvferry.gateway.http.openai_reply import encode
from kvferry.gateway.http.unary.bodies import VectorBody, check_count, check_texts, is_ids, parse
from kvferry.model.requests.pooling import PoolingParams
from kvferry.rpc.text import embedding
from kvferry.rpc.text.embedding import MAX_INPUTS, Input, VectorRequest
from kvferry.rpc.text.text_model import TextModel
from kvferry.rpc.text.text_service import TextService
from kvferry.rpc.text.token_source import Vector

_VECTORS_AT_ONCE = 32
"""Number of vectors that are written as JSON before other tasks have a turn."""


class VectorUsage(Struct):
    """Token counts of a request without output."""

    prompt_tokens: int
    total_tokens: int


def usage_of(vectors: Sequence[Vector]) -> VectorUsage:
    """Return the token counts of all inputs together."""
    count = sum(vector.num_prompt_tokens for vector in vectors)
    return VectorUsage(count, count)


def check_input(value: object) -> list[Input]:
    """Check the inputs of a request: a text, its token ids, or a list of either; return them as a list.

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
            raise InvalidRequest(f"{where} must be a list of token ids; it is {shown(ids)}", field=where)
    return value


class EmbeddingsBody(VectorBody):
    """Body of POST /v1/embeddings."""

    input: Annotated[list[Input], PlainValidator(check_input)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    normalize: bool = True
    """Extension: whether vectors have an L2 norm of 1."""


@dataclass(frozen=True, slots=True)
class ReadEmbeddings:
    """A valid body with its inputs as token ids."""

    inputs: list[list[int]]
    params: PoolingParams
    priority: int
    cache_salt: str
    is_base64: bool


def read_embeddings(model: TextModel, body: bytes, context_tokens: int) -> ReadEmbeddings:
    """Parse a body and tokenize its inputs.

    Raises:
        InvalidRequest, UnknownModel: the request is invalid or cannot be served by this gateway.
    """
    asked = parse(EmbeddingsBody, model, body)
    names = [f"input.{number}" for number in range(len(asked.input))] if len(asked.input) > 1 else ["input"]
    return ReadEmbeddings(
        embedding.encode_inputs(model, asked.input, names, context_tokens),
        asked.params(normalize=asked.normalize, dimensions=asked.dimensions),
        asked.priority,
        asked.cache_salt or "",
        asked.encoding_format == "base64",
    )


async def answer_embeddings(service: TextService, caller: Caller, body: bytes) -> bytes:
    """Answer POST /v1/embeddings.

    Raises:
        KvferryError: the request is invalid, or could not be computed.
    """
    asked = await service.read(read_embeddings, len(body), body, service.served_tokens)
    embedding.check_vectors(service, asked.params, len(asked.inputs), "input")
    vectors = await embedding.embed(
        service,
        VectorRequest(
            request_id=caller.request_id,
            inputs=asked.inputs,
            params=asked.params,
            tenant=caller.tenant,
            cache_salt=asked.cache_salt,
            priority=asked.priority,
            arrived=caller.arrived,
        ),
    )
    data: list[Raw] = []
    for index, vector in enumerate(vectors):
        if index % _VECTORS_AT_ONCE == _VECTORS_AT_ONCE - 1:
            await asyncio.sleep(0)
        value = _as_base64(vector) if asked.is_base64 else vector.values.tolist()
        data.append(Raw(encode({"object": "embedding", "index": index, "embedding": value})))
    usage = usage_of(vectors)
    return encode({"object": "list", "data": data, "model": service.model.name, "usage": usage})


def _as_base64(vector: Vector) -> str:
    return base64.b64encode(vector.values.astype(np.dtype("<f4")).tobytes()).decode("ascii")
