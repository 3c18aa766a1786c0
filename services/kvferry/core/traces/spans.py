"""Spans, as used by traced code, and the position in a trace that calls carry (W3C Trace Context).

Code that runs for a request finds the request's span in a context variable, which tasks inherit; it is `None` if the
request is not traced, so that an untraced request costs one look-up per phase.
"""

import re
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvferry.core.errors import UsageError

Attribute = str | int | float | bool
TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_MAX_STATE_CHARS = 512


class SpanKind(StrEnum):
    """Role of a span in a call."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Destination and sampling rate of traces."""

    url: str
    """URL of a collector that accepts OTLP over HTTP, without `/v1/traces`."""
    share: float = 1.0
    """Fraction of the requests without a sampling decision by their client that are traced, from 0 to 1. With 0, no
    request is traced, regardless of its client's decision."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            UsageError: the URL is not an HTTP URL, or the share is out of range.
        """
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.url):
            raise UsageError(f"otlp {self.url!r} is not an HTTP URL; use http://HOST:4318", field="otlp")
        if not 0.0 <= self.share <= 1.0:
            raise UsageError(f"trace_sample must be between 0 and 1, not {self.share}", field="trace_sample")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Position of a call in a trace."""

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str = ""
    """Value of `tracestate`, passed on unchanged."""

    @classmethod
    def parse(cls, traceparent: str | None, state: str | None = None) -> "TraceContext | None":
        """Read the value of a `traceparent` header; `None` if it is missing or invalid (W3C Trace Context, section
        3.2: an invalid one is ignored, later versions may be longer).

        Args:
            traceparent: value of the `traceparent` header; `None` if there was none.
            state: value of the `tracestate` header; left out if it is longer than the limit.
        """
        found = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent)
        if found is None:
            return None
        version, trace_id, span_id, flags, rest = found.groups()
        if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
            return None
        kept = state if state and len(state) <= _MAX_STATE_CHARS else ""
        return cls(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & 1), kept)

    @property
    def traceparent(self) -> str:
        """Value of a `traceparent` header."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """gRPC metadata that carries the position with a call."""
        pairs = ((TRACEPARENT, self.traceparent),)
        return (*pairs, (TRACESTATE, self.state)) if self.state else pairs


class Span(Protocol):
    """A phase of a request. Times are monotonic seconds of the tracer's clock; `None` is now."""

    @property
    def context(self) -> TraceContext:
        """Position of the span, for calls made within it."""
        ...

    def child(
        self,
        name: str,
        start: float | None = None,
        attributes: Mapping[str, Attribute] | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> "Span":
        """Begin a phase within this one.

        Args:
            name: name of the phase.
            start: start time; `None` is now.
            attributes: attributes of the new span.
            kind: role of the span in a call.
        """
        ...

    def phase(
        self, name: str, start: float, end: float | None = None, attributes: Mapping[str, Attribute] | None = None
    ) -> None:
        """Record an ended phase within this one.

        Args:
            name: name of the phase.
            start: start time.
            end: end time; `None` is now.
            attributes: attributes of the new span.
        """
        ...

    def event(self, name: str, attributes: Mapping[str, Attribute] | None = None) -> None:
        """Record an event at the current time."""
        ...

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        """Set attributes."""
        ...

    def end(self, error: str = "") -> None:
        """End the span; `error` is the stable reason of a failure, never a message."""
        ...


class Tracer(Protocol):
    """Starts traces, or this process's part of traces that a caller started."""

    def begin(
        self,
        name: str,
        parent: TraceContext | None,
        start: float,
        attributes: Mapping[str, Attribute],
        *,
        only_within: bool = False,
    ) -> Span | None:
        """Begin the span of a call that was received.

        Args:
            name: name of the span.
            parent: position that the call carried.
            start: time of the call, monotonic seconds.
            attributes: attributes of the span.
            only_within: whether calls without a sampled parent are not traced.

        Returns:
            `None` if the call is not traced.
        """
        ...

    def close(self) -> None:
        """Send the remaining spans; blocks for at most a few seconds."""
        ...


_current: ContextVar[Span | None] = ContextVar("span", default=None)


def current_span() -> Span | None:
    """Return the span of the request that this task works for; `None` if it is not traced."""
    return _current.get()


def use_span(span: Span | None) -> None:
    """Make `span` the current span of this task and of the tasks that it creates."""
    _current.set(span)


def context_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> TraceContext | None:
    """Return the position in the metadata of a gRPC call; `None` if there is none."""
    names = (TRACEPARENT, TRACESTATE)
    found = {key: value for key, value in metadata or () if key in names and isinstance(value, str)}
    return TraceContext.parse(found.get(TRACEPARENT), found.get(TRACESTATE))
