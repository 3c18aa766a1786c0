"""Picture of a serving benchmark as SVG: distributions of TTFT, TPOT and ITL, and output tokens over time."""

from collections.abc import Mapping, Sequence

from kvferry.bench.serving.charts import Curve, Mark, Panel, Points, page
from kvferry.bench.workload.measures import MeasuredAnswer, percentile

_MAX_POINTS = 400
_MARKED = (50, 90, 99)


def picture(
    answers: Sequence[MeasuredAnswer], title: str, subtitle: str = "", slo: Mapping[str, float] | None = None
) -> str:
    """Draw the answers that did not fail, with the 50th, 90th and 99th percentiles.

    Args:
        answers: the answers of a run.
        title, subtitle: first lines of the page.
        slo: latency targets in seconds by name, drawn as lines; see `parse_slo`.
    """
    good = [answer for answer in answers if not answer.error]
    distributions = (
        ("time to first token, ms", "share of requests", "ttft", [a.ttft for a in good]),
        ("time per output token, ms", "share of requests", "tpot", [t for a in good if (t := a.tpot) is not None]),
        ("inter-token latency, ms", "share of messages", "itl", [gap for a in good for gap in a.gaps]),
    )
    panels = [
        Panel(x, y, [_distribution(values)], is_distribution=True, limit=_in_ms((slo or {}).get(name)))
        for x, y, name, values in distributions
    ]
    rates = Panel("seconds", "output tokens per second", [Curve("", _rates(good))])
    return page(title, [*panels, rates], subtitle)


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _distribution(seconds: Sequence[float]) -> Curve:
    ordered = sorted(1e3 * value for value in seconds)
    marks = [Mark(f"p{p}", percentile(ordered, p), p / 100) for p in _MARKED] if ordered else []
    return Curve("", _shares(ordered), marks)


def _shares(ordered: Sequence[float]) -> Points:
    """Return the cumulative distribution of ascending values, thinned to a bounded number of points."""
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
