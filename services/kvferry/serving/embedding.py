"""Pooled vectors of a request's inputs: bounds, tokenization, and a few computations at a time."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from kvferry.core.errors import InvalidRequest, context_overflow
from kvferry.core.inference.pooling import PoolingParams
from kvferry.core.limits import MAX_MESSAGE_BYTES, MAX_TOKEN_IDS
from kvferry.core.sampling import NO_SAMPLING
from kvferry.serving import prompts
from kvferry.serving.admission import RequestSize, Slot
from kvferry.serving.request import Caller, ClientIdentity, Request
from kvferry.serving.text_model import TextModel
from kvferry.serving.text_service import TextService
from kvferry.serving.token_source import Vector, VectorSource
from kvferry.text.requests.pooling import check_dimensions

MAX_INPUTS = 1024
"""Maximum number of inputs of one request."""
MAX_RUNNING_INPUTS = 16
"""Maximum number of inputs of one request that are computed at a time, so that the request does not delay others."""
_VALUE_BYTES = 4
_RESPONSE_ROOM_BYTES = 1 << 20

Input = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class VectorRequest:
    """A validated request for the vectors of several inputs."""

    caller: Caller
    inputs: Sequence[Sequence[int]]
    """Token ids of each input, from `read_inputs`."""
    params: PoolingParams
    held_bytes: int = 0
    """Memory that the request holds while it waits for its admission, besides its tokens, in bytes."""


def check_num_inputs(count: int, field: str) -> None:
    """Check the number of inputs.

    Args:
        count: number of inputs.
        field: name of the request's field, for error messages.

    Raises:
        InvalidRequest: there are no inputs, or more than `MAX_INPUTS`.
    """
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidRequest(f"{field} has {count} inputs; it must have 1 to {MAX_INPUTS}", field=field)


def check_vectors(service: TextService, params: PoolingParams, count: int, field: str) -> None:
    """Check the parameters of vectors, and that all of them fit into one response.

    Args:
        service: the served model.
        params: parameters of the vectors; `dimensions` is checked.
        count: number of inputs.
        field: name of the request's field with the inputs.

    Raises:
        InvalidRequest: this server computes no vectors, or `dimensions` or the number of inputs is out of range.
    """
    size = service.model.hidden_size
    if service.vectors is None or not size:
        raise InvalidRequest(f"model {service.model.name!r} is not served for embeddings here", field="model")
    check_num_inputs(count, field)
    check_dimensions(params.dimensions, size)
    limit = (MAX_MESSAGE_BYTES - _RESPONSE_ROOM_BYTES) // (_VALUE_BYTES * (params.dimensions or size))
    if count > limit:
        raise InvalidRequest(
            f"{field} has {count} inputs with vectors of {params.dimensions or size} values; at most {limit} fit into "
            "one response. Send fewer inputs, or set dimensions",
            field=field,
        )


async def read_inputs(
    service: TextService, client: ClientIdentity, inputs: Sequence[Input], names: Sequence[str]
) -> list[list[int]]:
    """Tokenize the inputs and check their tokens.

    Args:
        service: the served model, and the process that tokenizes.
        client: the client that sent them.
        inputs: each a string or a list of token ids.
        names: name of each input in the request, for errors.

    Raises:
        InvalidRequest: an input is empty, too long or not text, or the inputs have too many tokens in total.
    """
    size = sum(len(text) for text in inputs if isinstance(text, str))
    return await service.read(client, encode_inputs, size, inputs, names, service.served_tokens)


def encode_inputs(
    model: TextModel, inputs: Sequence[Input], names: Sequence[str], context_tokens: int
) -> list[list[int]]:
    """Tokenize the inputs of one request and check their tokens; the job of `read_inputs`.

    Args:
        model: tokenizer of the served model.
        inputs: each a string or a list of token ids.
        names: name of each input in the request, for errors.
        context_tokens: maximum number of tokens of an input.

    Raises:
        InvalidRequest: an input is empty, too long or not text, or the inputs have too many tokens in total.
    """
    found: list[list[int]] = []
    left = MAX_TOKEN_IDS
    for given, name in zip(inputs, names, strict=True):
        try:
            ids = prompts.encode_text(model, given) if isinstance(given, str) else list(given)
        except InvalidRequest as error:
            raise InvalidRequest(f"{name}: {error.message}", field=name, reason=error.reason) from None
        if not ids:
            raise InvalidRequest(f"{name} is empty; send at least one token", field=name)
        if len(ids) > context_tokens:
            raise context_overflow(len(ids), context_tokens, has_output=False, field=name)
        prompts.check_token_ids(model, ids, name)
        left -= len(ids)
        if left < 0:
            raise InvalidRequest(
                f"the inputs up to {name} have more than {MAX_TOKEN_IDS} tokens; send fewer inputs per request",
                field=name,
            )
        found.append(ids)
    return found


async def embed(service: TextService, request: VectorRequest) -> list[Vector]:
    """Compute the vectors of all inputs as soon as the request is admitted, `MAX_RUNNING_INPUTS` at a time. If one
    fails, the others are cancelled.

    Args:
        service: the text service, whose vectors are enabled (`check_vectors`).
        request: the inputs and parameters.

    Raises:
        KvferryError: the request is not admitted, or an input failed: the error of the first one.
    """
    source = service.vectors
    assert source is not None, "`check_vectors` was called"
    if service.admission is None:
        return await _embed(source, request, None)
    work = RequestSize(
        caller=request.caller,
        prompts=request.inputs,
        num_samples=1,
        num_running=min(MAX_RUNNING_INPUTS, len(request.inputs)),
        max_tokens=0,
        held_bytes=request.held_bytes,
    )
    async with service.admission.enter(work) as slot:
        return await _embed(source, request, slot)


async def _embed(source: VectorSource, request: VectorRequest, slot: Slot | None) -> list[Vector]:
    turns = asyncio.Semaphore(MAX_RUNNING_INPUTS)
    caller = request.caller if slot is None else slot.admitted(request.caller)

    async def one(index: int, ids: Sequence[int]) -> Vector:
        async with turns, nullcontext() if slot is None else slot.sample_slot(index):
            tokens = Request(caller, ids, NO_SAMPLING, sample_index=index)
            vector = await source.pool(tokens, request.params)
            if slot is not None:
                slot.record_tokens(index, 0)
                slot.record_usage(index, vector.num_cached_tokens)
            return vector

    tasks = [asyncio.create_task(one(index, ids)) for index, ids in enumerate(request.inputs)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
