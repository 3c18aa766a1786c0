"""Converts between pooled vectors and `kvferry.v1` messages."""

from collections.abc import Sequence

import numpy as np

from kvferry.core.errors import InvalidRequest
from kvferry.core.ids import RequestId
from kvferry.serving.token_source import Vector
from kvferry.text.requests.pooling import Pooling, PoolingParams
from kvferry.v1 import common_pb2, inference_pb2, prefill_pb2

_TO_WIRE = {
    Pooling.LAST: common_pb2.POOLING_LAST,
    Pooling.MEAN: common_pb2.POOLING_MEAN,
    Pooling.CLS: common_pb2.POOLING_CLS,
}
_FROM_WIRE = {common_pb2.POOLING_UNSPECIFIED: Pooling.LAST} | {wire: pooling for pooling, wire in _TO_WIRE.items()}


def pooling_to_wire(params: PoolingParams) -> common_pb2.PoolingParams:
    """Convert the parameters of a vector to a message."""
    return common_pb2.PoolingParams(
        pooling=_TO_WIRE[params.pooling], normalize=params.normalize, dimensions=params.dimensions or 0
    )


def pooling_from_wire(message: common_pb2.PoolingParams) -> PoolingParams:
    """Convert a message to the parameters of a vector; unset fields get their defaults.

    Raises:
        InvalidRequest: the pooling is unknown.
    """
    if message.pooling not in _FROM_WIRE:
        raise InvalidRequest(
            f"pooling {message.pooling} is unknown; use POOLING_LAST, POOLING_MEAN or POOLING_CLS", field="pooling"
        )
    normalize = message.normalize if message.HasField("normalize") else True
    return PoolingParams(_FROM_WIRE[message.pooling], normalize, message.dimensions or None)


def vector_from_wire(message: prefill_pb2.PoolResponse, num_prompt_tokens: int) -> Vector:
    """Convert a worker's response to a vector.

    Args:
        message: the response.
        num_prompt_tokens: number of tokens of the input.
    """
    return Vector(np.array(message.values, np.float32), num_prompt_tokens, message.num_cached_tokens)


def vectors_to_wire(request_id: RequestId, vectors: Sequence[Vector]) -> inference_pb2.EmbedResponse:
    """Convert the vectors of a request to a response, with their total usage."""
    return inference_pb2.EmbedResponse(
        request_id=request_id,
        embeddings=[
            inference_pb2.EmbedResponse.Embedding(values=v.values.tolist(), prompt_tokens=v.num_prompt_tokens)
            for v in vectors
        ],
        usage=inference_pb2.Usage(
            prompt_tokens=sum(v.num_prompt_tokens for v in vectors),
            cached_tokens=sum(v.num_cached_tokens for v in vectors),
        ),
    )


def vectors_from_wire(message: inference_pb2.EmbedResponse) -> list[Vector]:
    """Convert a response to vectors; only the total usage has the number of cached tokens."""
    return [Vector(np.array(e.values, np.float32), e.prompt_tokens) for e in message.embeddings]
