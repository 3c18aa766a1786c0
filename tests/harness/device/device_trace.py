"""Trace of the stand-in device on a virtual clock: when each step and each copy would run.

A step takes `STEP_SECONDS`, a copy `PAGE_SECONDS` for each page. Steps run in order, copies run in order on their own
stream, after the steps that they are ordered after. Each host thread has a time of its own, which advances only when
the thread waits for the device; its launches start no earlier. A step is therefore late if the engine's thread, or the
stream of the steps, has waited for copies.
"""

import threading
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

STEP_SECONDS = 0.010
PAGE_SECONDS = 0.001


@dataclass(frozen=True)
class Span:
    """A step or a copy on the virtual clock."""

    kind: str
    """`step` or `copy`."""
    start: float
    end: float
    num_pages: int = 0


class DeviceTrace:
    """Start and end of each step and copy. Thread-safe."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._ready = {"step": 0.0, "copy": 0.0}
        self._host: defaultdict[int, float] = defaultdict(float)
        self._ends: dict[int, float] = {}
        self._lock = threading.Lock()

    def step(self, number: int) -> None:
        """Launch a step."""
        with self._lock:
            self._ends[number] = self._run("step", STEP_SECONDS)

    def read(self, number: int) -> None:
        """Let the calling thread wait for a step."""
        with self._lock:
            self._wait(self._ends[number])

    def after_steps(self) -> None:
        """Order the following copies after the launched steps."""
        with self._lock:
            self._ready["copy"] = max(self._ready["copy"], self._ready["step"])

    def copy(self, num_pages: int, stream: str = "copy") -> None:
        """Launch a copy on a stream."""
        with self._lock:
            self._run("copy", num_pages * PAGE_SECONDS, num_pages, stream)

    def settle(self) -> None:
        """Let the calling thread wait for the copies."""
        with self._lock:
            self._wait(self._ready["copy"])

    @property
    def late_seconds(self) -> float:
        """Seconds for which the stream of the steps was idle between steps."""
        steps = [span for span in self.spans if span.kind == "step"]
        return sum(after.start - before.end for before, after in pairwise(steps))

    @property
    def num_pages(self) -> int:
        """Number of copied pages."""
        return sum(span.num_pages for span in self.spans)

    @property
    def num_pages_beside_steps(self) -> int:
        """Number of pages whose copies began before the last step ended."""
        end = max((span.end for span in self.spans if span.kind == "step"), default=0.0)
        return sum(span.num_pages for span in self.spans if span.kind == "copy" and span.start < end)

    def _run(self, kind: str, seconds: float, num_pages: int = 0, stream: str = "") -> float:
        stream = stream or kind
        start = max(self._ready[stream], self._host[threading.get_ident()])
        self._ready[stream] = start + seconds
        self.spans.append(Span(kind, start, start + seconds, num_pages))
        return start + seconds

    def _wait(self, end: float) -> None:
        own = threading.get_ident()
        self._host[own] = max(self._host[own], end)
