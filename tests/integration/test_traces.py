"""A request over a prefill and a decode process makes one connected trace with spans of each process."""

from collections.abc import Iterator

import httpx
import pytest
from harness.servers.otlp_collector import Collector, ReceivedSpan, otlp_collector
from harness.servers.processes import running

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ADDRESSES = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "error")
ENGINE = ("--model", "tiny", "--dtype", "float32", "--kv-memory", "16MiB", "--connector", "shm", "--threads", "1")
ALWAYS = ("--load-policy", "always")
SERVER_NANOSECONDS = 1_000_000_000


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with otlp_collector() as receiving:
        yield receiving


def test_one_trace_through_gateway_prefill_handoff_and_decode(collector: Collector) -> None:
    with running("up", *ENGINE, *ALWAYS, "--otlp", collector.url, "--json", *ADDRESSES) as process:
        url = f"http://{process.wait_for('ready')['http']}"
        answer = httpx.post(
            f"{url}/v1/completions",
            json={"prompt": "many words that fill several blocks of the cache " * 4, "max_tokens": 12, "seed": 1},
            headers={"traceparent": f"00-{TRACE}-{SPAN}-01"},
            timeout=60,
        )
        assert answer.status_code == 200
        assert process.stop() == 0
    spans = [span for span in collector.spans if span.trace_id == TRACE]
    by_id = {span.span_id: span for span in spans}
    names = {span.span_id: span.name for span in spans}
    tree = sorted((names.get(span.parent_id, ""), span.name) for span in spans)
    assert tree == sorted(
        [
            ("", "POST /v1/completions"),
            ("POST /v1/completions", "queue"),
            ("POST /v1/completions", "sample"),
            ("sample", "route"),
            ("sample", "prefill"),
            ("prefill", "kvferry.v1.Prefill/Run"),
            ("kvferry.v1.Prefill/Run", "queue"),
            ("kvferry.v1.Prefill/Run", "compute"),
            ("sample", "route"),
            ("sample", "decode"),
            ("decode", "kvferry.v1.Decode/Run"),
            ("kvferry.v1.Decode/Run", "handoff"),
            ("kvferry.v1.Decode/Run", "queue"),
            ("kvferry.v1.Decode/Run", "decode"),
        ]
    )
    for span in spans:
        parent = by_id.get(span.parent_id)
        if parent is None:
            assert span.parent_id == SPAN
        else:
            # A server ends its span after the last message, and this message ends the caller's span.
            latest = parent.end + (SERVER_NANOSECONDS if span.kind == "server" else 0)
            assert parent.start <= span.start <= span.end <= latest, (parent.name, span.name)
    assert {span.service for span in spans} == {"kvferry-gateway", "kvferry-prefill", "kvferry-decode"}
    handoff = one(spans, "handoff")
    timing = answer.json()["kvferry"]
    assert handoff.attributes["kvferry.handoff.bytes"] == timing["handoff_bytes"] > 0
    assert handoff.attributes["kvferry.handoff.blocks"] == timing["handoff_blocks"] > 0
    assert handoff.attributes["kvferry.handoff.connector"] == timing["connector"] == "shm"
    assert not any(span.is_error for span in spans)
    assert one(spans, "compute").end <= handoff.end
    assert "many words" not in str(spans)


def one(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    (found,) = [span for span in spans if span.name == name]
    return found
