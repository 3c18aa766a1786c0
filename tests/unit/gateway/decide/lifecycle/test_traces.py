"""One request makes one connected trace at the gateway, in the client's trace if it has one."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway
from harness.fakes.scripted_worker import Act, Fault
from harness.servers.otlp_collector import Collector, ReceivedSpan, otlp_collector

from kvferry.core.traces.spans import TraceSettings
from kvferry.v1 import inference_pb2, inference_pb2_grpc

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
SECRET = "the-text-of-the-prompt"
BODY = {"prompt": SECRET, "max_tokens": 8, "seed": 3}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with otlp_collector() as running:
        yield running


@asynccontextmanager
async def traced(collector: Collector, share: float = 1.0, **settings: Any) -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway(traces=TraceSettings(collector.url, share), **settings) as gateway:
        yield gateway


async def ask(gateway: ScriptedGateway, traceparent: str = SAMPLED, **body: Any) -> httpx.Response:
    headers = {"traceparent": traceparent} if traceparent else {}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as client:
        return await client.post("/v1/completions", json={**BODY, **body}, headers=headers)


def nested(spans: list[ReceivedSpan]) -> dict[str, ReceivedSpan]:
    """Check that each span lies within its parent, and return the spans by id."""
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        assert span.start <= span.end
        parent = by_id.get(span.parent_id)
        if parent is not None:
            assert parent.start <= span.start, (parent.name, span.name)
            assert span.end <= parent.end, (parent.name, span.name)
    return by_id


def tree(spans: list[ReceivedSpan]) -> list[tuple[str, str]]:
    names = {span.span_id: span.name for span in spans}
    return [(names.get(span.parent_id, ""), span.name) for span in sorted(spans, key=lambda span: span.start)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_trace_within_that_of_the_client(collector, stream):
    async with traced(collector) as gateway:
        answer = await ask(gateway, stream=stream)
        assert answer.status_code == 200
        (prefill,), (decode,) = gateway.workers.prefill, gateway.workers.decode
        assert len(prefill.prefills) == len(decode.decodes) == 1
    spans = collector.spans
    assert {span.trace_id for span in spans} == {TRACE}
    root = next(span for span in spans if span.parent_id == SPAN)
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{root.span_id}-01"
    assert sorted(tree(spans)) == sorted(
        [
            ("", "POST /v1/completions"),
            ("POST /v1/completions", "queue"),
            ("POST /v1/completions", "sample"),
            ("sample", "route"),
            ("sample", "prefill"),
            ("sample", "route"),
            ("sample", "decode"),
        ]
    )
    nested(spans)
    by_name = {span.name: span for span in spans}
    assert root.attributes["http.response.status_code"] == 200
    assert by_name["decode"].attributes["kvferry.handoff.bytes"] == 1024
    assert by_name["decode"].attributes["kvferry.handoff.blocks"] == 2
    assert by_name["decode"].attributes["kvferry.handoff.connector"] == "scripted"
    assert by_name["sample"].attributes["gen_ai.usage.output_tokens"] == 8
    assert by_name["sample"].attributes["kvferry.outcome"] == "done"
    assert not any(span.is_error for span in spans)
    assert SECRET not in str(spans)


async def test_samples_are_siblings(collector):
    async with traced(collector) as gateway:
        await ask(gateway, n=3)
    samples = [span for span in collector.spans if span.name == "sample"]
    assert sorted(span.attributes["kvferry.sample_index"] for span in samples) == [0, 1, 2]
    assert len({span.parent_id for span in samples}) == 1
    nested(collector.spans)


async def test_requests_that_are_not_sampled_make_no_spans(collector):
    async with traced(collector) as gateway:
        answer = await ask(gateway, UNSAMPLED)
        assert "traceresponse" not in answer.headers
        async with httpx.AsyncClient(base_url=gateway.url) as client:
            assert (await client.get("/v1/models", headers={"traceparent": SAMPLED})).status_code == 200
    async with traced(collector, share=0.0) as gateway:
        assert (await ask(gateway)).status_code == 200
    async with traced(collector, share=1e-9) as gateway:
        assert (await ask(gateway, "")).status_code == 200
    assert collector.spans == []


async def test_a_request_without_a_position_begins_a_trace_and_an_invalid_one_is_ignored(collector):
    async with traced(collector) as gateway:
        await ask(gateway, "")
        await ask(gateway, "00-nonsense")
    roots = [span for span in collector.spans if span.parent_id == ""]
    assert len({span.trace_id for span in roots}) == len(roots) == 2


async def test_a_lost_worker_is_an_event_and_the_stream_resumes(collector):
    async with traced(collector, decode=2) as gateway:
        faults = deque([Fault(Act.DIE, after_tokens=3)])  # the worker that is called first is stopped
        for worker in gateway.workers.decode:
            worker.faults["decode"] = faults
        answer = await ask(gateway, stream=True)
        assert answer.status_code == 200
    samples = [span for span in collector.spans if span.name == "sample"]
    (sample,) = [span for span in samples if span.events]
    names = [name for name, _ in sample.events]
    assert names == ["lost", "resumed"]
    assert sample.events[0][1]["kvferry.output_tokens"] == sample.events[1][1]["kvferry.output_tokens"] == 4
    assert sample.attributes["kvferry.resumed"] == 1
    assert not sample.is_error
    calls = [span for span in collector.spans if span.parent_id == sample.span_id and span.name == "decode"]
    calls.sort(key=lambda span: span.start)
    assert [span.is_error for span in calls] == [True, False]
    assert calls[0].attributes["kvferry.worker"] != calls[1].attributes["kvferry.worker"]
    nested(collector.spans)


async def test_a_refused_request_ends_its_trace_with_the_reason(collector):
    async with traced(collector) as gateway:
        assert (await ask(gateway, temperature=-1)).status_code == 400
        gateway.workers.prefill[0].faults["prefill"].append(Fault(Act.HANG))
        asking = asyncio.create_task(ask(gateway))
        await gateway.workers.prefill[0].fault_reached.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await gateway.idle()
    refused, left = sorted((s for s in collector.spans if s.kind == "server"), key=lambda span: span.start)
    assert (refused.attributes["http.response.status_code"], refused.is_error) == (400, False)
    assert left.is_error
    (sample,) = [span for span in collector.spans if span.name == "sample"]
    assert (sample.attributes["kvferry.outcome"], sample.is_error) == ("cancelled", True)


async def test_grpc_carries_the_position_too(collector):
    async with traced(collector) as gateway, grpc.aio.insecure_channel(gateway.gateway.listening.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(text=SECRET)
        request.sampling.max_tokens = 4
        _ = [message async for message in stub.Generate(request, metadata=(("traceparent", SAMPLED),))]
    root = next(span for span in collector.spans if span.parent_id == SPAN)
    assert (root.name, root.trace_id, root.kind) == ("kvferry.v1.Inference/Generate", TRACE, "server")
    assert ("kvferry.v1.Inference/Generate", "sample") in tree(collector.spans)
    assert ("sample", "decode") in tree(collector.spans)
    assert SECRET not in str(collector.spans)
    nested(collector.spans)
