"""Trace contexts are parsed as W3C Trace Context specifies, and settings are checked."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import UsageError
from kvferry.core.traces.spans import TraceContext, TraceSettings, context_of

VALID = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_position_is_read_and_written() -> None:
    found = TraceContext.parse(VALID, "vendor=1")
    assert found == TraceContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True, "vendor=1")
    assert found.traceparent == VALID
    assert context_of([*found.metadata, ("other", b"x")]) == found


@given(st.integers(1, (1 << 128) - 1), st.integers(1, (1 << 64) - 1), st.booleans())
def test_a_position_survives_a_call(trace_id: int, span_id: int, is_sampled: bool) -> None:
    context = TraceContext(trace_id, span_id, is_sampled)
    assert context_of(context.metadata) == context


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        VALID.upper(),
        VALID + "-more",
        VALID.replace("00-", "ff-", 1),
        VALID.replace("b7ad6b7169203331", "0" * 16),
        VALID.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        VALID[:-1],
        "0" + VALID,
        VALID + "\n",
    ],
)
def test_an_invalid_position_is_ignored(value: str | None) -> None:
    assert TraceContext.parse(value) is None


def test_later_versions_may_be_longer_and_other_flags_are_ignored() -> None:
    found = TraceContext.parse(VALID.replace("00-", "cc-", 1) + "-more")
    assert found is not None
    assert found.is_sampled
    assert TraceContext.parse(VALID[:-2] + "fe") == TraceContext(found.trace_id, found.span_id, False)


def test_a_long_state_is_dropped() -> None:
    found = TraceContext.parse(VALID, "a=" + "b" * 600)
    assert found is not None
    assert found.state == ""
    assert found.metadata == (("traceparent", VALID),)


@pytest.mark.parametrize(
    ("url", "share", "field"),
    [("collector:4318", 1.0, "otlp"), ("grpc://c:4317", 1.0, "otlp"), ("http://c", 1.5, "trace_sample")],
)
def test_invalid_settings_are_refused_by_name(url: str, share: float, field: str) -> None:
    with pytest.raises(UsageError) as refused:
        TraceSettings(url, share)
    assert refused.value.field == field
