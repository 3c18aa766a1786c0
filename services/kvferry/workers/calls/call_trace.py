"""Trace spans of one request's call to a worker: KV loads, queue, then the prefill or decode phase."""

from collections.abc import Sequence
from typing import Any

import grpc

from kvferry.core.clock import Clock
from kvferry.core.traces.spans import Span, Tracer, context_of
from kvferry.engine.loop.engine_stream import StreamItem

Context = grpc.aio.ServicerContext[Any, Any]


class CallTrace:
    """Follows the events of a request's stream. A context manager; without a span, nothing is recorded."""

    def __init__(self, span: Span | None, clock: Clock, begun: float, work: str, connector: str) -> None:
        """
        Args:
            span: span of the call; `None` if it is not traced.
            clock: clock of the phases.
            begun: time of the call, monotonic seconds.
            work: name of the computing phase.
            connector: name of the worker's connector.
        """
        self._span, self._clock, self._work, self._connector = span, clock, work, connector
        self._at = begun
        self._is_started = False
        self._num_tokens = 0

    def add(self, items: Sequence[StreamItem]) -> None:
        """Process events of the stream, in order, as they arrive."""
        if self._span is None:
            return
        now = self._clock.monotonic()
        for item in items:
            if item.load is not None:
                loaded = item.load
                name = "handoff" if loaded.source == "peer" else "load"
                start = max(self._at, now - loaded.seconds)
                attributes: dict[str, str | int | float | bool] = {
                    "kvferry.handoff.source": loaded.source,
                    "kvferry.handoff.connector": self._connector,
                    "kvferry.handoff.blocks": loaded.num_blocks,
                    "kvferry.handoff.bytes": loaded.num_bytes,
                    "kvferry.handoff.seconds": loaded.seconds,
                    "kvferry.handoff.is_whole": loaded.failure is None,
                }
                self._span.phase(name, start, now, attributes)
                self._at = now
            if item.is_started and not self._is_started:
                self._span.phase("queue", self._at, now)
                self._at, self._is_started = now, True
            if item.update is not None:
                self._num_tokens += len(item.update.tokens)

    def __enter__(self) -> "CallTrace":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if self._span is None:
            return
        if self._is_started:
            self._span.phase(self._work, self._at, attributes={"kvferry.output_tokens": self._num_tokens})
        reason = getattr(error, "reason", None) or (kind.__name__ if kind is not None else "")
        self._span.end("" if isinstance(error, GeneratorExit) and self._num_tokens else str(reason).lower())


def call_trace(
    tracer: Tracer | None, context: Context, method: str, work: str, clock: Clock, request_id: str, connector: str
) -> CallTrace:
    """Begin the trace of a call, if its caller traces it.

    Args:
        tracer: tracer of the worker; `None` without tracing.
        context: context of the call, whose metadata may name the caller's span.
        method: name of the RPC.
        work: name of the phase that follows queue and KV loads: `prefill` or `decode`.
        clock: clock of the spans.
        request_id: id of the request.
        connector: name of the worker's connector.
    """
    begun = clock.monotonic()
    if tracer is None:
        return CallTrace(None, clock, begun, work, connector)
    parent = context_of(context.invocation_metadata())
    attributes = {"rpc.system": "grpc", "rpc.method": method, "kvferry.request_id": request_id}
    span = tracer.begin(method, parent, begun, attributes, only_within=True)
    return CallTrace(span, clock, begun, work, connector)
