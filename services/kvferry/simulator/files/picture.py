"""SVG chart of one or several simulations: distributions of the latencies, one curve per simulation."""

from collections.abc import Sequence

from kvferry.bench.serving.charts import Curve, Mark, Panel, Points, page
from kvferry.simulator.fleet.measures import PERCENTILES, Measures, WeightedHistogram

_MAX_POINTS = 400


def picture(title: str, simulations: Sequence[tuple[str, Measures]], subtitle: str = "") -> str:
    """Draw the latency distributions of simulations.

    Args:
        title: title of the page.
        subtitle: second line of the page.
        simulations: name and measures of each.

    Returns:
        An SVG image.
    """
    panels: list[Panel] = []
    for name, attribute in (
        ("time to first token, ms", "ttft"),
        ("inter-token latency, ms", "itl"),
        ("time of the whole request, ms", "e2e"),
        ("time in the gateway's queue, ms", "queue"),
    ):
        curves = [_curve(label, getattr(measures, attribute)) for label, measures in simulations]
        shares = "share of tokens" if attribute == "itl" else "share of requests"
        panels.append(Panel(name, shares, curves, is_distribution=True))
    return page(title, panels, subtitle)


def _curve(label: str, histogram: WeightedHistogram) -> Curve:
    marks = [Mark(f"p{p}", 1e3 * histogram.percentile(p), p / 100) for p in PERCENTILES] if histogram.count else []
    return Curve(label, _shares(histogram), marks)


def _shares(histogram: WeightedHistogram) -> Points:
    every = [(1e3 * value, share) for value, share in histogram.shares()]
    shares = [point for point in every if point[1] < 0.9999] or every[:1]
    step = max(1, len(shares) // _MAX_POINTS)
    return shares[::step]
