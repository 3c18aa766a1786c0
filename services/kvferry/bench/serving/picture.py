"""Picture of a serving benchmark as SVG: distributions of TTFT, TPOT and ITL, and output tokens over time."""

from collections.abc import Sequence

from kvferry.bench.serving.charts import Points, page
from kvferry.bench.workload.measures import MeasuredAnswer

_MAX_POINTS = 400


def picture(answers: Sequence[MeasuredAnswer], title: str) -> str:
    """Draw the answers that did not fail."""
    good = [answer for answer in answers if not answer.error]
    per_token = [1e3 * tpot for a in good if (tpot := a.tpot) is not None]
    panels = [
        ("time to first token, ms", "share of requests", _shares([1e3 * a.ttft for a in good])),
        ("time per output token, ms", "share of requests", _shares(per_token)),
        ("inter-token latency, ms", "share of messages", _shares([1e3 * gap for a in good for gap in a.gaps])),
        ("seconds", "output tokens per second", _rates(good)),
    ]
    return page(title, [(x, y, [("", points)]) for x, y, points in panels])


def _shares(values: Sequence[float]) -> Points:
    """Return the cumulative distribution of values, thinned to a bounded number of points."""
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        return []
    step = max(1, count // _MAX_POINTS)
    chosen = sorted({*range(0, count, step), count - 1})
    return [(ordered[index], (index + 1) / count) for index in chosen]


def _rates(answers: Sequence[MeasuredAnswer]) -> Points:
    """Return the output tokens per second in intervals of equal length."""
    end = max((a.times[-1] for a in answers), default=0.0)
    if not end:
        return []
    width = end / 60
    counts = [0.0] * 60
    for answer in answers:
        weight = answer.num_output / len(answer.times)
        for time in answer.times:
            counts[min(59, int(time / width))] += weight
    return [((index + 0.5) * width, count / width) for index, count in enumerate(counts)]
