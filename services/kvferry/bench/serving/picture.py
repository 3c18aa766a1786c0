"""Picture of a serving benchmark as SVG: distributions of TTFT, TPOT and ITL, and output tokens over time."""

import math
from collections.abc import Sequence
from html import escape

from kvferry.bench.workload.measures import Answer

_WIDTH, _HEIGHT, _LEFT, _TOP = 420, 220, 52, 30
_INK, _LINE, _GRID = "#1f2937", "#2563eb", "#d1d5db"
_MAX_POINTS = 400
Points = Sequence[tuple[float, float]]


def picture(answers: Sequence[Answer], title: str) -> str:
    """Draw the answers that did not fail."""
    good = [answer for answer in answers if not answer.error]
    per_token = [1e3 * tpot for a in good if (tpot := a.tpot) is not None]
    panels = [
        ("time to first token, ms", "share of requests", _shares([1e3 * a.ttft for a in good])),
        (
            "time per output token, ms",
            "share of requests",
            _shares(per_token),
        ),
        ("inter-token latency, ms", "share of messages", _shares([1e3 * gap for a in good for gap in a.gaps])),
        ("seconds", "output tokens per second", _rates(good)),
    ]
    width, height = 2 * (_WIDTH + 20) + 20, 2 * (_HEIGHT + 60) + 50
    drawn = [
        _panel(20 + index % 2 * (_WIDTH + 20), 50 + index // 2 * (_HEIGHT + 60), x, y, points)
        for index, (x, y, points) in enumerate(panels)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11" fill="{_INK}"><rect width="{width}" height="{height}" fill="white"/>'
        f'<text x="20" y="28" font-size="15">{escape(title)}</text>{"".join(drawn)}</svg>\n'
    )


def _shares(values: Sequence[float]) -> Points:
    """Return the cumulative distribution of values, thinned to a bounded number of points."""
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        return []
    step = max(1, count // _MAX_POINTS)
    chosen = sorted({*range(0, count, step), count - 1})
    return [(ordered[index], (index + 1) / count) for index in chosen]


def _rates(answers: Sequence[Answer]) -> Points:
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


def _axis_end(most: float) -> float:
    """Return the end of an axis from 0 with four intervals of a round length."""
    if most <= 0.0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(most / 4))
    return 4 * unit * next(factor for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if 4 * unit * factor >= most * (1 - 1e-9))


def _panel(left: float, top: float, x_title: str, y_title: str, points: Points) -> str:
    x_most = _axis_end(max((x for x, _ in points), default=0.0))
    y_most = _axis_end(max((y for _, y in points), default=0.0))
    inner_width, inner_height = _WIDTH - _LEFT, _HEIGHT - _TOP
    parts = [f'<g transform="translate({left},{top})">']
    for index in range(5):
        share = index / 4
        y = _HEIGHT - share * inner_height
        x = _LEFT + share * inner_width
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_GRID}"/>')
        parts.append(f'<text x="{_LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{share * y_most:.4g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT + 14}" text-anchor="middle">{share * x_most:.4g}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_TOP - 12}">{escape(y_title)}</text>')
    parts.append(f'<text x="{_WIDTH}" y="{_HEIGHT + 30}" text-anchor="end">{escape(x_title)}</text>')
    if points:
        path = " ".join(
            f"{_LEFT + x / x_most * inner_width:.1f},{_HEIGHT - y / y_most * inner_height:.1f}" for x, y in points
        )
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_LINE}" stroke-width="1.5"/>')
    return "".join(parts) + "</g>"
