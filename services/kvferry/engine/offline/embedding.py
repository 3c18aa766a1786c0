"""Pooled vectors of the offline API: outputs, requests to the engine, and similarities."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import InvalidRequest
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.offline.prompts import Prompt, prompt_list
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate
from kvferry.text.requests.pooling import PoolingParams, check_dimensions, pooling_named

_NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """Pooled vector of one prompt."""

    prompt_token_ids: tuple[int, ...]
    embedding: npt.NDArray[np.float32]
    """[dimensions] values of the vector."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""


def pooling_params(pooling: str, normalize: bool, dimensions: int | None, hidden_size: int) -> PoolingParams:
    """Check the parameters of a vector.

    Args:
        pooling: name of a `Pooling`.
        normalize: whether the vector is scaled to length 1.
        dimensions: number of leading values to return; `None` for all.
        hidden_size: number of values of the model's vectors.

    Raises:
        InvalidRequest: the pooling is unknown, or there are too many or too few dimensions.
    """
    check_dimensions(dimensions, hidden_size)
    return PoolingParams(pooling_named(pooling), normalize, dimensions)


def pooling_request(
    request_id: RequestId,
    token_ids: Sequence[int],
    params: PoolingParams,
    *,
    tenant: str = "",
    priority: int = 0,
    deadline: float | None = None,
) -> EngineRequest:
    """Create a pooling request; it samples no tokens, so its sampling parameters have no effect.

    Args:
        request_id: id of the request.
        token_ids: token ids of the prompt.
        params: parameters of the vector.
        tenant: cache scope of the prompt.
        priority: priority of the request; lower numbers come first.
        deadline: monotonic time in seconds at which the request is aborted; `None` for no deadline.
    """
    return EngineRequest(
        request_id,
        list(token_ids),
        _NO_SAMPLING,
        priority=priority,
        deadline=deadline,
        tenant=tenant,
        pooling=params,
    )


def embedding_of(request: EngineRequest, update: SequenceUpdate) -> Embedding:
    """Return the output of a pooling request that has ended."""
    assert update.embedding is not None, "a pooling request ended without a vector"
    return Embedding(tuple(request.token_ids), update.embedding, update.num_cached)


def prompt_key(prompt: Prompt) -> str | tuple[int, ...]:
    """Return a key for a prompt, so that equal prompts are computed once."""
    return prompt if isinstance(prompt, str) else tuple(prompt)


def pairs(a: Prompt | Sequence[Prompt], b: Prompt | Sequence[Prompt]) -> list[tuple[Prompt, Prompt]]:
    """Return the pairs to compare: one with one, one with each of several, or the items of two equally long lists.

    Raises:
        InvalidRequest: the numbers of prompts do not match, or a list is empty.
    """
    left, right = prompt_list(a, "a"), prompt_list(b, "b")
    if len(left) == 1:
        left = left * len(right)
    if not right or len(left) != len(right):
        raise InvalidRequest(
            f"{len(left)} prompts in a cannot be compared with {len(right)} in b; pass one prompt in a, or as many as "
            "in b",
            field="prompts",
        )
    return list(zip(left, right, strict=True))
