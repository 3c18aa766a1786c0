"""Token source that uses this process's engine, so that a worker of role `both` can serve clients directly."""

from collections.abc import AsyncGenerator

from kvferry.engine.offline.embedding import pooling_request
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.serving.request import Request
from kvferry.serving.token_source import Timing, TokenEvent, Vector
from kvferry.text.requests.pooling import PoolingParams
from kvferry.workers.calls.context import WorkerContext, sequence_id
from kvferry.workers.handoff.kv_report import KvReportBuilder
from kvferry.workers.services.pooling import compute_vector


class LocalSource:
    """`TokenSource` and `VectorSource` that use this process's engine."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    async def stream(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        self._context.admit("")
        clock = self._context.clock
        begun = clock.monotonic()
        first: float | None = None
        stream = self._context.loop.submit(
            EngineRequest(
                request_id=sequence_id(request.caller.request_id, request.sample_index),
                token_ids=list(request.token_ids),
                sampling=request.sampling,
                sample_index=request.sample_index,
                priority=request.caller.priority,
                deadline=request.caller.deadline,
                tenant=request.caller.scope,
                adapter=request.caller.adapter,
            )
        )
        kv_report = KvReportBuilder(self._context.worker_id)
        with stream:
            async for item in stream:
                kv_report.add(item)
                updates = [i.update for i in (item, *stream.take_ready()) if i.update is not None]
                if not updates:
                    continue
                if first is None:
                    first = clock.monotonic()
                timing = Timing(
                    queue_seconds=max(0.0, begun - request.caller.arrived),
                    prefill_seconds=first - begun,
                    first_token_seconds=first - request.caller.arrived,
                    handoff_outcome="none",
                    decode_worker=self._context.worker_id,
                    kv=tuple(kv_report.reports),
                )
                yield TokenEvent(
                    tokens=tuple(token for u in updates for token in u.tokens),
                    finish_reason=updates[-1].finish_reason,
                    num_cached_tokens=updates[-1].num_cached,
                    timing=timing,
                    prompt_logprobs=updates[0].scores,
                )

    async def pool(self, request: Request, params: PoolingParams) -> Vector:
        self._context.admit("")
        pooling = pooling_request(
            sequence_id(request.caller.request_id, request.sample_index),
            request.token_ids,
            params,
            tenant=request.caller.scope,
            priority=request.caller.priority,
            deadline=request.caller.deadline,
        )
        update = await compute_vector(self._context, pooling, KvReportBuilder(self._context.worker_id))
        assert update.embedding is not None
        return Vector(update.embedding, len(request.token_ids), update.num_cached)
