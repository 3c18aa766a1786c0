"""Token source that uses this process's engine, so that a worker of role `both` can serve clients directly."""

from collections.abc import AsyncGenerator

from kvferry.core.inference.chunks import Timing
from kvferry.core.inference.pooling import PoolingParams
from kvferry.core.pausing import VersionRuns, with_version
from kvferry.core.retention import Retention
from kvferry.engine.offline.engine_requests import engine_request, token_event
from kvferry.serving.request import Request
from kvferry.serving.token_source import TokenEvent, Vector
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
        retention: Retention | None = None
        versions: VersionRuns = ()
        num_tokens = 0
        name = sequence_id(request.caller.request_id, request.sample_index)
        stream = self._context.loop.submit(engine_request(request, name))
        kv_report = KvReportBuilder(self._context.worker_id)
        with stream:
            async for item in stream:
                kv_report.add(item)
                items = (item, *stream.take_ready())
                updates = [i.update for i in items if i.update is not None]
                if not updates:
                    continue
                for one in items:
                    if one.update is not None and one.update.tokens:
                        versions = with_version(versions, one.weights.name, num_tokens)
                        num_tokens += len(one.update.tokens)
                retention = next((i.retention for i in items if i.retention is not None), retention)
                if first is None:
                    first = clock.monotonic()
                timing = Timing(
                    queue_seconds=max(0.0, begun - request.caller.arrived),
                    prefill_seconds=first - begun,
                    first_token_seconds=first - request.caller.arrived,
                    handoff_outcome="none",
                    decode_worker=self._context.worker_id,
                    kv=tuple(kv_report.reports),
                    retention=retention,
                    weight_versions=versions,
                )
                yield token_event(updates, timing)

    async def pool(self, request: Request, params: PoolingParams) -> Vector:
        self._context.admit("")
        name = sequence_id(request.caller.request_id, request.sample_index)
        pooling = engine_request(request, name, params)
        update = await compute_vector(self._context, pooling, KvReportBuilder(self._context.worker_id))
        assert update.embedding is not None
        return Vector(update.embedding, len(request.token_ids), update.num_cached + update.num_loaded)
