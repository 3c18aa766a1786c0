"""Exports spans by OTLP over HTTP, with OpenTelemetry's SDK: in batches, on a separate thread, from a bounded queue.

A span is put into the queue when it ends and never waits: if the collector is slow or unreachable, the oldest
spans are dropped, and one warning is logged.
"""

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvferry.core.clock import Clock
from kvferry.core.errors import UsageError
from kvferry.core.traces.spans import Attribute, Span, SpanKind, TraceContext, Tracer, TraceSettings

if TYPE_CHECKING:
    from opentelemetry import trace as otel

_log = logging.getLogger(__name__)
_PATH = "/v1/traces"
_MAX_QUEUED = 4096
_MAX_BATCH = 512
_EXPORT_SECONDS = 5.0
_BATCH_MILLIS = 500.0
_CLOSE_SECONDS = 3.0


def open_tracer(settings: TraceSettings | None, service: str, instance: str, clock: Clock) -> Tracer | None:
    """Create the tracer of a process; `None` if traces are off, and OpenTelemetry is then not imported.

    Args:
        settings: URL and sampled share; `None` for no traces.
        service: name of the service, for example `kvferry-gateway`.
        instance: name of the process.
        clock: clock of the spans.

    Raises:
        UsageError: OpenTelemetry is not installed.
    """
    if settings is None or not settings.share:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise UsageError(f"otlp needs OpenTelemetry: pip install 'kvferry[traces]' ({error})", field="otlp") from error
    url = settings.url.rstrip("/")
    _warn_once(url)
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.share)),
        resource=Resource.create({"service.name": service, "service.instance.id": instance}),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(url if url.endswith(_PATH) else url + _PATH, timeout=_EXPORT_SECONDS)
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=_MAX_QUEUED,
            schedule_delay_millis=_BATCH_MILLIS,
            max_export_batch_size=_MAX_BATCH,
        )
    )
    return _OtlpTracer(provider, exporter, clock)


class _OtlpTracer:
    def __init__(self, provider: Any, exporter: Any, clock: Clock) -> None:
        self._provider, self._exporter = provider, exporter
        self._tracer: otel.Tracer = provider.get_tracer("kvferry")
        self._clock = clock

    def begin(
        self,
        name: str,
        parent: TraceContext | None,
        start: float,
        attributes: Mapping[str, Attribute],
        *,
        only_within: bool = False,
    ) -> Span | None:
        if only_within and (parent is None or not parent.is_sampled):
            return None
        # The offset of the wall clock is taken once for each trace, so that its spans keep their order.
        clock = _SpanClock(self._clock, self._clock.wall() - self._clock.monotonic())
        span = self._tracer.start_span(
            name,
            context=_remote(parent),
            kind=_kind(SpanKind.SERVER),
            start_time=clock.nanoseconds(start),
            attributes=attributes,
        )
        return _OtlpSpan(self._tracer, span, clock) if span.is_recording() else None

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)
        if closing.is_alive():
            self._exporter.shutdown()  # ends its retries, so that the threads end


class _SpanClock:
    def __init__(self, clock: Clock, offset: float) -> None:
        self._clock, self._offset = clock, offset

    def nanoseconds(self, at: float | None) -> int:
        """Return the Unix time in nanoseconds of a monotonic time in seconds."""
        return int((self._offset + (self._clock.monotonic() if at is None else at)) * 1e9)


class _OtlpSpan:
    def __init__(self, tracer: "otel.Tracer", span: "otel.Span", clock: _SpanClock) -> None:
        self._tracer, self._span, self._clock = tracer, span, clock

    @property
    def context(self) -> TraceContext:
        found = self._span.get_span_context()
        return TraceContext(found.trace_id, found.span_id, is_sampled=True, state=found.trace_state.to_header())

    def child(
        self,
        name: str,
        start: float | None = None,
        attributes: Mapping[str, Attribute] | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> "_OtlpSpan":
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(
            name,
            context=set_span_in_context(self._span),
            kind=_kind(kind),
            start_time=self._clock.nanoseconds(start),
            attributes=attributes,
        )
        return _OtlpSpan(self._tracer, span, self._clock)

    def phase(
        self, name: str, start: float, end: float | None = None, attributes: Mapping[str, Attribute] | None = None
    ) -> None:
        inner = self.child(name, start, attributes)
        inner._span.end(self._clock.nanoseconds(end))

    def event(self, name: str, attributes: Mapping[str, Attribute] | None = None) -> None:
        self._span.add_event(name, attributes, self._clock.nanoseconds(None))

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        self._span.set_attributes(attributes)

    def end(self, error: str = "") -> None:
        if error:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR, error)
            self._span.set_attribute("error.type", error)
        self._span.end(self._clock.nanoseconds(None))


def _remote(parent: TraceContext | None) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

    if parent is None:
        return Context()
    state = TraceState.from_header([parent.state]) if parent.state else None
    flags = TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT)
    context = SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags, trace_state=state)
    return set_span_in_context(NonRecordingSpan(context), Context())


def _kind(kind: SpanKind) -> "otel.SpanKind":
    from opentelemetry.trace import SpanKind

    return SpanKind[kind.name]


class _FirstOnly(logging.Handler):
    """Logs one warning for the first record; OpenTelemetry logs each batch that it cannot send."""

    def __init__(self, url: str) -> None:
        super().__init__(logging.WARNING)
        self._url = url
        self._is_silent = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._is_silent:
            self._is_silent = True
            _log.warning("traces cannot be sent to %s and are dropped: %s", self._url, record.getMessage())


def _warn_once(url: str) -> None:
    logger = logging.getLogger("opentelemetry")
    logger.handlers[:] = [_FirstOnly(url)]
    logger.propagate = False
