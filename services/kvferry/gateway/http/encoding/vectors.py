"""Vectors of the inputs of one HTTP request, for embeddings and for comparisons."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import Struct

from kvferry.core.inference.pooling import PoolingParams
from kvferry.gateway.http.encoding.bodies import VectorBody
from kvferry.serving import embedding
from kvferry.serving.embedding import Input, VectorRequest
from kvferry.serving.request import Caller
from kvferry.serving.text_model import TextModel
from kvferry.serving.text_service import TextService
from kvferry.serving.token_source import Vector


class VectorUsage(Struct):
    """Token counts of a request without output."""

    prompt_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class VectorInputs:
    """Inputs of a valid body as token ids, and the parameters of their vectors."""

    token_ids: list[list[int]]
    params: PoolingParams
    priority: int
    cache_salt: str


def read_inputs(
    model: TextModel,
    body: VectorBody,
    inputs: Sequence[Input],
    names: Sequence[str],
    context_tokens: int,
    *,
    normalize: bool = True,
    dimensions: int | None = None,
) -> VectorInputs:
    """Tokenize the inputs of a body.

    Args:
        model: the model's text parts.
        body: the body, with the parameters that all routes share.
        inputs: texts or lists of token ids.
        names: name of each input in the body, for errors.
        context_tokens: maximum number of tokens of one input.
        normalize: whether vectors have an L2 norm of 1.
        dimensions: number of leading values to keep; `None` for all.

    Raises:
        InvalidRequest: an input or the pooling is invalid.
    """
    return VectorInputs(
        embedding.encode_inputs(model, inputs, names, context_tokens),
        body.params(normalize=normalize, dimensions=dimensions),
        body.priority,
        body.cache_salt or "",
    )


async def compute_vectors(service: TextService, caller: Caller, inputs: VectorInputs, field: str) -> list[Vector]:
    """Compute the vectors of all inputs.

    Args:
        service: the served model, and the workers.
        caller: request id, tenant and arrival time.
        inputs: tokenized inputs, and the parameters of their vectors.
        field: name of the body's field with the inputs, for errors.

    Raises:
        KvferryError: a parameter or the number of inputs is out of range, or a vector could not be computed.
    """
    service.check_access(caller.tenant, service.model.name)
    embedding.check_vectors(service, inputs.params, len(inputs.token_ids), field)
    caller = replace(caller, cache_salt=inputs.cache_salt, priority=inputs.priority)
    request = VectorRequest(caller, inputs.token_ids, inputs.params)
    return await embedding.embed(service, request)


def names_of(field: str, count: int) -> list[str]:
    """Return the name of each input of a field in a body: a single string, or the items of a list."""
    return [field] if count == 1 else [f"{field}.{number}" for number in range(count)]


def usage_of(vectors: Sequence[Vector]) -> VectorUsage:
    """Return the total token counts of all inputs."""
    count = sum(vector.num_prompt_tokens for vector in vectors)
    return VectorUsage(count, count)
