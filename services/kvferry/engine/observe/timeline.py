"""Times of phases by lane, and their conversion to a Chrome trace.

lane engine    | messages | plan | compute ............... | record |  gap
lane runner                        | forward ...... | sample |
lane kernels                       | qkv | attention | ...
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kvferry.engine.observe.step_log import LoggedStep

ENGINE, RUNNER, KERNELS = "engine", "runner", "kernels"
LANES = (ENGINE, RUNNER, KERNELS)
GAP = "gap"


@dataclass(frozen=True, slots=True)
class TimelinePhase:
    """One phase, in seconds since the beginning."""

    lane: str
    name: str
    begun: float
    ended: float


class Timeline:
    """Phases in the order of their ends. Each lane is used by one thread."""

    def __init__(self) -> None:
        self.spans: list[TimelinePhase] = []
        self._open: dict[str, tuple[str, float]] = {}

    def begin(self, lane: str, name: str, now: float) -> None:
        """Begin a phase of a lane, and end the previous one.

        Args:
            lane: name of the lane.
            name: name of the phase; empty to only end the previous one.
            now: seconds since the start of the recording.
        """
        self.end(lane, now)
        if name:
            self._open[lane] = (name, now)

    def end(self, lane: str, now: float) -> None:
        """End the phase of a lane. Idempotent.

        Args:
            lane: name of the lane.
            now: seconds since the start of the recording.
        """
        begun = self._open.pop(lane, None)
        if begun is not None:
            self.spans.append(TimelinePhase(lane, begun[0], begun[1], now))

    def kernels(self, seconds: Mapping[str, float]) -> None:
        """Add the kernels of the runner's last forward pass. Only total durations are known, so the kernels are drawn
        one after another, in proportion to their durations, over the span of the pass."""
        total = sum(seconds.values())
        last = next((span for span in reversed(self.spans) if span.lane == RUNNER), None)
        if last is None or total <= 0:
            return
        at, scale = last.begun, (last.ended - last.begun) / total
        for name, each in seconds.items():
            if each > 0:
                self.spans.append(TimelinePhase(KERNELS, name, at, at + each * scale))
                at += each * scale


@dataclass(frozen=True, slots=True)
class PhaseStatistics:
    """Times of one phase in milliseconds."""

    lane: str
    name: str
    count: int
    mean_ms: float
    p50_ms: float
    p99_ms: float
    share: float
    """Share of the recorded time."""


def with_gaps(spans: Iterable[TimelinePhase], lane: str = ENGINE) -> list[TimelinePhase]:
    """Return the spans and, for one lane, a span for each gap between two of its spans, sorted by start.

    Args:
        spans: spans of all lanes, in any order.
        lane: the lane whose gaps are added.
    """
    ordered = sorted(spans, key=lambda span: span.begun)
    gaps: list[TimelinePhase] = []
    end: float | None = None
    for span in ordered:
        if span.lane != lane:
            continue
        if end is not None and span.begun > end:
            gaps.append(TimelinePhase(lane, GAP, end, span.begun))
        end = span.ended if end is None else max(end, span.ended)
    return sorted([*ordered, *gaps], key=lambda span: span.begun)


def statistics(spans: Iterable[TimelinePhase]) -> list[PhaseStatistics]:
    """Summarize phases by lane and name, longest first within each lane."""
    times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    known = list(spans)
    for span in known:
        times[span.lane, span.name].append(span.ended - span.begun)
    total = max((s.ended for s in known), default=0.0) - min((s.begun for s in known), default=0.0)
    rows = [
        PhaseStatistics(
            lane,
            name,
            len(found),
            1e3 * float(np.mean(found)),
            1e3 * float(np.percentile(found, 50)),
            1e3 * float(np.percentile(found, 99)),
            sum(found) / total if total else 0.0,
        )
        for (lane, name), found in times.items()
    ]
    return sorted(rows, key=lambda row: (LANES.index(row.lane), -row.share))


def chrome_trace(spans: Iterable[TimelinePhase], steps: Iterable[LoggedStep]) -> dict[str, object]:
    """Return a trace in the format of Chrome's tracing, which Perfetto also reads: complete events in microseconds.

    Args:
        spans: phases of all lanes.
        steps: the steps; each step with a plan becomes an event with its number of sequences and of tokens.
    """
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": lane}}
        for number, lane in enumerate(("steps", *LANES))
    ]
    for number, step in enumerate(step for step in steps if step.plan):
        arguments = {
            "sequences": len(step.plan),
            "tokens": sum(count for _, _, count, _ in step.plan),
            "decoding": sum(count == 1 for _, _, count, _ in step.plan),
        }
        events.append({**_event(f"step {number}", 0, step.begun, step.ended), "args": arguments})
    events += [_event(span.name, 1 + LANES.index(span.lane), span.begun, span.ended) for span in spans]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _event(name: str, lane: int, begun: float, ended: float) -> dict[str, object]:
    begin = round(1e6 * begun, 3)
    return {"ph": "X", "pid": 1, "tid": lane, "name": name, "ts": begin, "dur": round(1e6 * ended - begin, 3)}
