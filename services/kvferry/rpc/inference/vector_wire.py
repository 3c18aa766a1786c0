"""Converts between pooled vectors and `kvferry.v1` messages."""

from collections.abc import Sequence

import numpy as np

from kvferry.core.ids import RequestId
from kvferry.serving.token_source import Vector
from kvferry.v1 import inference_pb2, prefill_pb2


def vector_from_wire(message: prefill_pb2.PoolResponse, num_prompt_tokens: int) -> Vector:
    """Convert a worker's response to a vector.

    Args:
        message: the response.
        num_prompt_tokens: number of tokens of the input.
    """
    num_cached = message.num_cached_tokens + message.num_loaded_tokens
    return Vector(np.array(message.values, np.float32), num_prompt_tokens, num_cached)


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
