"""Computes pooled vectors with this process's engine."""

from collections.abc import Awaitable, Callable

from kvferry.core.errors import Unavailable
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate
from kvferry.workers.calls.context import WorkerContext
from kvferry.workers.handoff.kv_report import KvReportBuilder


async def compute_vector(
    context: WorkerContext,
    request: EngineRequest,
    kv_report: KvReportBuilder,
    on_started: Callable[[], Awaitable[None]] | None = None,
) -> SequenceUpdate:
    """Run a pooling request and return its last update. Cancelling the calling task aborts the request.

    Args:
        context: the worker.
        request: the request, from `embedding.pooling_request`.
        kv_report: collects the sources of the prompt's KV.
        on_started: called before the first step that includes the request.

    Raises:
        KvferryError: the engine rejected or failed the request.
        Unavailable: the engine's updates ended without an embedding.
    """
    is_started = False
    with context.loop.submit(request) as stream:
        async for item in stream:
            kv_report.add(item)
            if item.is_started and not is_started:
                is_started = True
                if on_started is not None:
                    await on_started()
            if item.update is not None and item.update.embedding is not None:
                return item.update
    raise Unavailable("the request ended without an embedding")
