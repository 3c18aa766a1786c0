"""Statistics of a serving benchmark, in the shape of vLLM's `benchmark_serving`.

All times are measured from a request's arrival in the workload, not from when the client sent it: a client that falls
behind would otherwise hide the server's queueing (coordinated omission).

| measure | per | meaning |
| --- | --- | --- |
| TTFT | request | first token after arrival |
| ITL | message after the first | time since the message before |
| TPOT | request with 2 tokens or more | time from first to last token / (tokens - 1) |
| E2EL | request | last token after arrival |
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.core.errors import UsageError

_PERCENTILES = (50, 90, 95, 99)
SLO_NAMES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    """Times and sizes of the answer to one request."""

    at: float
    """Arrival time in seconds after the start."""
    sent: float
    times: tuple[float, ...]
    """Time of each message with text, in seconds after the start; empty if the request failed."""
    num_input: int
    num_output: int
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.times[0] - self.at

    @property
    def e2el(self) -> float:
        """Seconds from arrival to the last token."""
        return self.times[-1] - self.at

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first; `None` for a single token."""
        if self.num_output < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.num_output - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between messages."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


def parse_slo(text: str) -> dict[str, float]:
    """Parse latency targets, such as `ttft=500ms,itl=30ms`, into seconds by name. A target for ITL applies to the 99th
    percentile of each request's ITL.

    Raises:
        UsageError: a name is unknown or repeated, or a duration is not a positive number with `ms` or `s`.
    """
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        unit = next((unit for unit in ("ms", "s") if value.endswith(unit)), "")
        try:
            seconds = float(value.removesuffix(unit)) * {"ms": 1e-3, "s": 1.0, "": math.nan}[unit]
        except ValueError:
            seconds = math.nan
        if name not in SLO_NAMES or not 0 < seconds < math.inf:
            raise UsageError(
                f"{part[:40]!r} is not a target; use one of {', '.join(SLO_NAMES)} with a positive time in ms or s, "
                "such as ttft=500ms",
                field="slo",
            )
        if name in found:
            raise UsageError(f"the target {name} is set twice; set it once", field="slo")
        found[name] = seconds
    return found


def meets(answer: MeasuredAnswer, slo: Mapping[str, float]) -> bool:
    """Return whether an answer meets all latency targets.

    Args:
        answer: the answer of one request.
        slo: latency targets in seconds, by name (`ttft`, `tpot`, `itl`, `e2el`).
    """
    if answer.error:
        return False
    measured = {
        "ttft": answer.ttft,
        "tpot": answer.tpot or 0.0,
        "itl": percentile(sorted(answer.gaps), 99),
        "e2el": answer.e2el,
    }
    return all(measured[name] <= limit for name, limit in slo.items())


def summary(answers: Sequence[MeasuredAnswer], slo: Mapping[str, float]) -> dict[str, object]:
    """Compute the statistics of a run: `duration` in seconds, rates per second, other times (`*_ms`) in milliseconds.
    `request_goodput` is `None` without targets."""
    good = [answer for answer in answers if not answer.error]
    duration = max((answer.times[-1] for answer in good), default=0.0)
    per = 1.0 / duration if duration else 0.0
    num_input, num_output = sum(a.num_input for a in good), sum(a.num_output for a in good)
    found: dict[str, object] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) * per,
        "request_goodput": sum(meets(answer, slo) for answer in answers) * per if slo else None,
        "output_throughput": num_output * per,
        "total_token_throughput": (num_input + num_output) * per,
        "max_send_delay_ms": 1e3 * max((a.sent - a.at for a in answers), default=0.0),
    }
    for name, seconds in (
        ("ttft", [a.ttft for a in good]),
        ("tpot", [tpot for a in good if (tpot := a.tpot) is not None]),
        ("itl", [gap for a in good for gap in a.gaps]),
        ("e2el", [a.e2el for a in good]),
    ):
        found |= _statistics(name, seconds)
    return found


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    found = {
        f"mean_{name}_ms": 1e3 * statistics.fmean(ordered) if ordered else 0.0,
        f"median_{name}_ms": 1e3 * percentile(ordered, 50),
        f"std_{name}_ms": 1e3 * statistics.pstdev(ordered) if ordered else 0.0,
    }
    return found | {f"p{p}_{name}_ms": 1e3 * percentile(ordered, p) for p in _PERCENTILES}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of ascending values, interpolated linearly; 0 if there are none."""
    if not ordered:
        return 0.0
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
