"""Line charts as SVG: several per page, each with one or more curves."""

import math
from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP = 420, 220, 52, 30
_INK, _GRID = "#1f2937", "#d1d5db"
_LINES = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2")
Points = Sequence[tuple[float, float]]
Panel = tuple[str, str, Sequence[tuple[str, Points]]]
"""Titles of the x and y axes, and the curves with their names; a single curve needs no name."""


def page(title: str, panels: Sequence[Panel]) -> str:
    """Draw panels in two columns."""
    rows = (len(panels) + 1) // 2
    width, height = 2 * (_WIDTH + 20) + 20, rows * (_HEIGHT + 60) + 50
    drawn = [
        _panel(20 + index % 2 * (_WIDTH + 20), 50 + index // 2 * (_HEIGHT + 60), *panel)
        for index, panel in enumerate(panels)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11" fill="{_INK}"><rect width="{width}" height="{height}" fill="white"/>'
        f'<text x="20" y="28" font-size="15">{escape(title)}</text>{"".join(drawn)}</svg>\n'
    )


def _axis_end(highest: float) -> float:
    """Return the end of an axis that begins at 0 and has four intervals of a round length."""
    if highest <= 0.0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(highest / 4))
    return 4 * unit * next(factor for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if 4 * unit * factor >= highest * (1 - 1e-9))


def _panel(left: float, top: float, x_title: str, y_title: str, curves: Sequence[tuple[str, Points]]) -> str:
    every = [point for _, points in curves for point in points]
    x_most = _axis_end(max((x for x, _ in every), default=0.0))
    y_most = _axis_end(max((y for _, y in every), default=0.0))
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
    for number, (name, points) in enumerate(curves):
        color = _LINES[number % len(_LINES)]
        if points:
            path = " ".join(
                f"{_LEFT + x / x_most * inner_width:.1f},{_HEIGHT - y / y_most * inner_height:.1f}" for x, y in points
            )
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if name:
            y = _TOP + 14 * (number + 1)
            parts.append(f'<text x="{_LEFT + 8}" y="{y}" fill="{color}">{escape(name)}</text>')
    return "".join(parts) + "</g>"
