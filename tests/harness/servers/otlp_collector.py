"""A collector of traces: OTLP over HTTP, decoded with the official messages."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span as a collector receives it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    """Unix time in nanoseconds."""
    end: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    kind: str
    is_error: bool


@dataclass
class Collector:
    """A running collector and the spans that it received."""

    url: str
    spans: list[ReceivedSpan] = field(default_factory=list)
    num_requests: int = 0
    change: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, is_enough: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """Return all spans as soon as `is_enough(spans)`.

        Raises:
            AssertionError: the spans did not arrive in time.
        """
        with self.change:
            assert self.change.wait_for(lambda: is_enough(self.spans), _SECONDS), [span.name for span in self.spans]
            return list(self.spans)

    def receive(self, body: bytes) -> None:
        """Add the spans of one export."""
        request = ExportTraceServiceRequest.FromString(body)
        with self.change:
            self.num_requests += 1
            for resource in request.resource_spans:
                service = _attributes(resource.resource.attributes)["service.name"]
                self.spans += [_received(service, span) for scope in resource.scope_spans for span in scope.spans]
            self.change.notify_all()


def _received(service: str, span: Span) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=[(event.name, _attributes(event.attributes)) for event in span.events],
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        is_error=span.status.code == 2,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextmanager
def otlp_collector() -> Iterator[Collector]:
    """Run a collector on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_right = self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            if is_right:
                collector.receive(body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200 if is_right else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
