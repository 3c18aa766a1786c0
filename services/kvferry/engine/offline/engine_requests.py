"""Requests of text serving as requests to an engine in the same process."""

from collections.abc import Sequence

from kvferry.core.ids import RequestId
from kvferry.core.inference.chunks import Timing
from kvferry.core.inference.pooling import PoolingParams
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate
from kvferry.serving.request import Request
from kvferry.serving.token_source import TokenEvent

_NO_TIMING = Timing()


def sample_id(request: Request) -> RequestId:
    """Return the id of a sample, which is unique in an engine that has no other callers."""
    return RequestId(f"{request.caller.request_id}/{request.sample_index}")


def engine_request(request: Request, name: RequestId, pooling: PoolingParams | None = None) -> EngineRequest:
    """Return the request for one sample of `request`.

    Args:
        request: the request, with the index of its sample.
        name: id of the sequence, which must be unique in the engine.
        pooling: parameters of the vector, if one is computed instead of tokens.
    """
    caller = request.caller
    if pooling is not None:
        return EngineRequest.for_vector(
            name, request.token_ids, pooling, scope=caller.scope, priority=caller.priority, deadline=caller.deadline
        )
    return EngineRequest(
        request_id=name,
        token_ids=list(request.token_ids),
        sampling=request.sampling,
        sample_index=request.sample_index,
        priority=caller.priority,
        deadline=caller.deadline,
        scope=caller.scope,
        adapter=caller.adapter,
        retain_seconds=request.retain_seconds,
    )


def token_event(updates: Sequence[SequenceUpdate], timing: Timing = _NO_TIMING) -> TokenEvent:
    """Return the tokens of successive updates of a sequence as one event.

    Args:
        updates: at least one update.
        timing: timing so far; nothing is timed offline.
    """
    return TokenEvent(
        tokens=tuple(token for update in updates for token in update.tokens),
        finish_reason=updates[-1].finish_reason,
        num_cached_tokens=updates[-1].num_cached + updates[-1].num_loaded,
        num_written_tokens=updates[-1].num_written,
        timing=timing,
        prompt_logprobs=updates[0].scores,
    )
