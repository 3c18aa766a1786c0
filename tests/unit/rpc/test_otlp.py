"""Spans reach a collector with their times and parents; an unreachable collector costs one warning and no time."""

import logging
import subprocess
import sys
import threading

import pytest
from harness.servers.otlp_collector import otlp_collector

from kvferry.core.clock import ManualClock, SystemClock
from kvferry.core.traces.spans import SpanKind, TraceContext, TraceSettings
from kvferry.rpc import otlp
from kvferry.rpc.otlp import open_tracer

PARENT = TraceContext(7, 9, is_sampled=True, state="vendor=1")


def test_spans_have_the_times_of_the_clock_and_their_parents() -> None:
    clock = ManualClock(now=10.0, epoch=1_000_000.0)
    with otlp_collector() as collector:
        tracer = open_tracer(TraceSettings(collector.url), "kvferry-test", "one", clock)
        assert tracer is not None
        span = tracer.begin("request", PARENT, 9.0, {"a": 1})
        assert span is not None
        inner = span.child("call", kind=SpanKind.CLIENT)
        inner.event("lost", {"why": "gone"})
        clock.advance(2.0)
        span.phase("queue", 9.5, 9.75, {"b": 0.5})
        inner.end("unavailable")
        span.end()
        tracer.close()
        spans = {span.name: span for span in collector.spans}
    request, call, queue = spans["request"], spans["call"], spans["queue"]
    assert request.service == "kvferry-test"
    assert {span.trace_id for span in spans.values()} == {f"{7:032x}"}
    assert (request.parent_id, call.parent_id, queue.parent_id) == (f"{9:016x}", request.span_id, request.span_id)
    assert [round(at / 1e9, 3) for at in (request.start, request.end)] == [1_000_009.0, 1_000_012.0]
    assert [round(at / 1e9, 3) for at in (queue.start, queue.end)] == [1_000_009.5, 1_000_009.75]
    assert (call.kind, call.is_error, call.attributes["error.type"]) == ("client", True, "unavailable")
    assert call.events == [("lost", {"why": "gone"})]
    assert (request.kind, request.is_error, request.attributes) == ("server", False, {"a": 1})


def test_a_call_carries_the_position_of_its_span_and_the_state() -> None:
    with otlp_collector() as collector:
        tracer = open_tracer(TraceSettings(collector.url), "s", "one", SystemClock())
        assert tracer is not None
        span = tracer.begin("request", PARENT, 0.0, {})
        assert span is not None
        assert span.context.trace_id == PARENT.trace_id
        assert span.context.span_id != PARENT.span_id
        assert span.context.state == "vendor=1"
        span.end()
        tracer.close()


def test_the_callers_decision_is_kept_and_the_share_decides_otherwise() -> None:
    with otlp_collector() as collector:
        some = open_tracer(TraceSettings(collector.url, 0.5), "s", "one", SystemClock())
        assert some is not None
        unsampled = TraceContext(7, 9, is_sampled=False)
        assert all(some.begin("r", unsampled, 0.0, {}) is None for _ in range(20))
        assert all(some.begin("r", PARENT, 0.0, {}) is not None for _ in range(20))
        begun = [some.begin("r", None, 0.0, {}) is not None for _ in range(400)]
        assert 100 < sum(begun) < 300
        assert some.begin("r", None, 0.0, {}, only_within=True) is None
        assert some.begin("r", unsampled, 0.0, {}, only_within=True) is None
        assert some.begin("r", PARENT, 0.0, {}, only_within=True) is not None
        some.close()
    assert open_tracer(TraceSettings("http://c", 0.0), "s", "one", SystemClock()) is None
    assert open_tracer(None, "s", "one", SystemClock()) is None


def test_an_unavailable_collector_costs_one_warning_and_bounded_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with otlp_collector() as gone:
        url = gone.url
    monkeypatch.setattr(otlp, "_MAX_QUEUED", 64)
    monkeypatch.setattr(otlp, "_MAX_BATCH", 16)
    monkeypatch.setattr(otlp, "_CLOSE_SECONDS", 0.05)
    logged = threading.Event()
    monkeypatch.setattr(otlp._log, "warning", lambda *args: (logging.getLogger("seen").warning(*args), logged.set()))
    tracer = open_tracer(TraceSettings(url), "s", "one", SystemClock())
    assert tracer is not None
    for number in range(1000):
        span = tracer.begin(f"r{number}", None, 0.0, {})
        assert span is not None
        span.end()
    (processor,) = tracer._provider._active_span_processor._span_processors
    assert len(processor._batch_processor._queue) <= 64
    assert logged.wait(30)
    tracer.close()
    for thread in (processor._batch_processor._worker_thread, *threading.enumerate()):
        if thread.name == "traces" or "Batch" in thread.name:
            thread.join(30)
            assert not thread.is_alive(), "the exporter retries after its end"
    assert len([record for record in caplog.records if record.name == "seen"]) == 1
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_without_a_collector_opentelemetry_is_not_imported() -> None:
    code = (
        "import sys, kvferry.gateway.gateway, kvferry.cli.main, kvferry.workers.main\n"
        "from kvferry.rpc.otlp import open_tracer\n"
        "from kvferry.core.clock import SystemClock\n"
        "assert open_tracer(None, 's', 'i', SystemClock()) is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
