"""A token source over this process's own engine: how a worker of role `both` answers clients directly."""

from collections.abc import AsyncGenerator

from kvferry.engine.messages import EngineRequest
from kvferry.rpc.token_source import Timing, TokenEvent, TokenRequest
from kvferry.workers.arrival import Arrival
from kvferry.workers.context import WorkerContext, sequence_id


class LocalSource:
    """`TokenSource` without a gateway."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    async def stream(self, request: TokenRequest) -> AsyncGenerator[TokenEvent, None]:
        self._context.admit("")
        clock = self._context.clock
        begun = clock.monotonic()
        first: float | None = None
        stream = self._context.loop.submit(
            EngineRequest(
                request_id=sequence_id(request.request_id, request.sample_index),
                token_ids=list(request.token_ids),
                sampling=request.sampling,
                sample_index=request.sample_index,
                tenant=request.tenant,
            )
        )
        arrival = Arrival(self._context.worker_id)
        with stream:
            async for item in stream:
                arrival.hear(item)
                updates = [i.update for i in (item, *stream.take_ready()) if i.update is not None]
                if not updates:
                    continue
                if first is None:
                    first = clock.monotonic()
                timing = Timing(
                    queue_seconds=max(0.0, begun - request.arrived),
                    prefill_seconds=first - begun,
                    first_token_seconds=first - request.arrived,
                    handoff_outcome="none",
                    decode_worker=self._context.worker_id,
                    kv=tuple(arrival.reports),
                )
                yield TokenEvent(
                    tokens=tuple(u.token for u in updates),
                    finish_reason=updates[-1].finish_reason,
                    num_cached_tokens=updates[-1].num_cached,
                    timing=timing,
                )
