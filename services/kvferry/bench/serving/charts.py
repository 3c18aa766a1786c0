"""Line charts as SVG: several per page, each with one or more curves. In dark surroundings the page is dark."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _HEIGHT, _LEFT, _TOP = 420, 220, 52, 30
_GAP, _ROW = 20, 14
_LOG_RATIO = 20.0
"""Ratio of the largest value to the 90th percentile of a distribution from which its axis is logarithmic."""
_STYLE = (
    "svg{--paper:#fff;--ink:#1f2937;--quiet:#6b7280;--grid:#d1d5db;"
    "--c0:#2563eb;--c1:#dc2626;--c2:#059669;--c3:#d97706;--c4:#7c3aed;--c5:#0891b2}"
    "@media(prefers-color-scheme:dark){svg{--paper:#111827;--ink:#e5e7eb;--quiet:#9ca3af;--grid:#374151;"
    "--c0:#60a5fa;--c1:#f87171;--c2:#34d399;--c3:#fbbf24;--c4:#a78bfa;--c5:#22d3ee}}"
)
_NUM_COLOURS = 6
Points = Sequence[tuple[float, float]]


class Mark(NamedTuple):
    """A named point of a curve, such as a percentile."""

    name: str
    x: float
    y: float


class Curve(NamedTuple):
    """A curve; a single one needs no name."""

    name: str
    points: Points
    marks: Sequence[Mark] = ()


class Panel(NamedTuple):
    """One chart of a page."""

    x_title: str
    y_title: str
    curves: Sequence[Curve]
    is_distribution: bool = False
    """Whether y is the share of values up to x: curves are drawn in steps, and outliers make the x axis logarithmic."""
    limit: float | None = None
    """A target of x, drawn as a line."""


def page(title: str, charts: Sequence[Panel], subtitle: str = "") -> str:
    """Draw panels in two columns.

    Args:
        title: first line of the page.
        charts: the panels.
        subtitle: second line, smaller.
    """
    heights = [_HEIGHT + 48 + _ROW * _num_legend_rows(one) for one in charts]
    drawn, top = [], 66
    for index in range(0, len(charts), 2):
        for column, chart in enumerate(charts[index : index + 2]):
            drawn.append(_panel(_GAP + column * (_WIDTH + 2 * _GAP), top, chart))
        top += max(heights[index : index + 2])
    width = 2 * (_WIDTH + 2 * _GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" font-family="sans-serif" font-size="11">'
        f'<style>{_STYLE}</style><rect width="{width}" height="{top}" fill="var(--paper)"/>'
        f'<g fill="var(--ink)"><text x="{_GAP}" y="26" font-size="15">{escape(title)}</text>'
        f'<text x="{_GAP}" y="44" fill="var(--quiet)">{escape(subtitle)}</text>{"".join(drawn)}</g></svg>\n'
    )


def _num_legend_rows(chart: Panel) -> int:
    return sum(bool(curve.name or curve.marks) for curve in chart.curves) + (chart.limit is not None)


class _Axis(NamedTuple):
    """Maps values to shares of an axis' length."""

    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        if self.is_log:
            value, low, high = math.log10(max(value, self.low)), math.log10(self.low), math.log10(self.high)
            return (value - low) / (high - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if not self.is_log:
            return [self.low + index / 4 * (self.high - self.low) for index in range(5)]
        first, last = round(math.log10(self.low)), round(math.log10(self.high))
        return [10.0**power for power in range(first, last + 1, max(1, (last - first) // 5))]


def _linear_axis(highest: float) -> _Axis:
    """Return an axis that begins at 0 and has four intervals of a round length."""
    if highest <= 0.0:
        return _Axis(0.0, 1.0)
    unit = 10.0 ** math.floor(math.log10(highest / 4))
    factor = next(one for one in (1.0, 2.0, 2.5, 5.0, 10.0) if 4 * unit * one >= highest * (1 - 1e-9))
    return _Axis(0.0, 4 * unit * factor)


def _x_axis(chart: Panel) -> _Axis:
    curves = chart.curves
    values = [x for curve in curves for x, _ in curve.points]
    highest = max([*values, chart.limit or 0.0], default=0.0)
    positive = [x for x in values if x > 0]
    if chart.is_distribution and positive:
        usual = max(next((x for x, y in curve.points if y >= 0.9), 0.0) for curve in curves)
        if 0 < usual * _LOG_RATIO < highest:
            low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(highest))
            return _Axis(10.0**low, 10.0 ** max(high, low + 1), is_log=True)
    return _linear_axis(highest)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _panel(left: float, top: float, chart: Panel) -> str:
    curves = chart.curves
    x_axis = _x_axis(chart)
    y_axis = _linear_axis(max((y for curve in curves for _, y in curve.points), default=0.0))
    inner_width, inner_height = _WIDTH - _LEFT, _HEIGHT - _TOP

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x_axis.share(x) * inner_width, _HEIGHT - y_axis.share(y) * inner_height

    parts = [f'<g transform="translate({left},{top})">']
    for tick in y_axis.ticks():
        _, y = at(x_axis.low, tick)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--grid)"/>')
        parts.append(f'<text x="{_LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    for tick in x_axis.ticks():
        x, _ = at(tick, y_axis.low)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_HEIGHT}" y2="{_HEIGHT + 3}" stroke="var(--quiet)"/>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT + 14}" text-anchor="middle">{_number(tick)}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_TOP - 12}">{escape(chart.y_title)}</text>')
    scale = ", logarithmic" if x_axis.is_log else ""
    parts.append(f'<text x="{_WIDTH}" y="{_HEIGHT + 28}" text-anchor="end">{escape(chart.x_title + scale)}</text>')
    row = _HEIGHT + 28
    if chart.limit is not None:
        x, _ = at(chart.limit, 0.0)
        line = f'x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT}"'
        parts.append(f'<line {line} stroke="var(--quiet)" stroke-dasharray="4 3"/>')
        row += _ROW
        parts.append(f'<text x="{_LEFT}" y="{row}" fill="var(--quiet)">target {_number(chart.limit)}</text>')
    for number, curve in enumerate(curves):
        colour = f"var(--c{number % _NUM_COLOURS})"
        if curve.points:
            corners = [at(x, y) for x, y in (_steps(curve.points) if chart.is_distribution else curve.points)]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for mark in curve.marks:
            x, y = at(mark.x, mark.y)
            about = f"{escape(mark.name)}: {_number(mark.x)}"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{about}</title></circle>')
        if curve.name or curve.marks:
            row += _ROW
            marks = ", ".join(f"{mark.name} {_number(mark.x)}" for mark in curve.marks)
            words = ": ".join(filter(None, (curve.name, marks)))
            parts.append(f'<text x="{_LEFT}" y="{row}" fill="{colour}">{escape(words)}</text>')
    if not any(curve.points for curve in curves):
        middle = (_TOP + _HEIGHT) / 2
        parts.append(f'<text x="{(_LEFT + _WIDTH) / 2}" y="{middle}" text-anchor="middle">no values</text>')
    elif chart.is_distribution and not any(x > 0 for curve in curves for x, _ in curve.points):
        middle = (_TOP + _HEIGHT) / 2
        parts.append(f'<text x="{(_LEFT + _WIDTH) / 2}" y="{middle}" text-anchor="middle">all values are 0</text>')
    return "".join(parts) + "</g>"


def _steps(points: Points) -> list[tuple[float, float]]:
    """Return the corners of a cumulative distribution, which is constant between two values."""
    corners, share = [], 0.0
    for x, y in points:
        corners += [(x, share), (x, y)]
        share = y
    return corners
