"""Online estimate of durations: non-negative least squares over recent observations.

    seconds = c0 x f0 + c1 x f1 + ...        features are given, coefficients are fitted

Recent observations have more weight (exponential decay), and errors are relative, since a choice between two options
depends on ratios. Where the observations do not determine the coefficients (for example if all have the same size), the
proportions of a prior are used, scaled to the observations. Coefficients are never negative, since durations are never
negative. After three consecutive outliers in one direction, conditions are assumed to have changed, and all earlier
observations are dropped.
"""

from collections import deque
from collections.abc import Sequence

_FADE = 0.95
"""Weight of an observation relative to the next observation; about the last twenty observations matter."""
_PRIOR_WEIGHT = 0.001
"""Weight of the prior's proportions relative to all observations together."""
_SURPRISE = 3.0
_SURPRISES = 3


class RecentFit:
    """Online fit of durations as a weighted sum of features. Not thread-safe."""

    def __init__(self, prior: Sequence[float]) -> None:
        """
        Args:
            prior: coefficients before the first observation, all positive; later only their proportions matter.

        Raises:
            ValueError: a coefficient is not positive.
        """
        if not prior or min(prior) <= 0:
            raise ValueError(f"prior={list(prior)} is invalid: every coefficient must be positive")
        self._prior = tuple(prior)
        self._fitted = self._prior
        self._last: deque[tuple[tuple[float, ...], float]] = deque(maxlen=_SURPRISES)
        self._surprises = 0
        """Number of consecutive outliers in one direction; positive if slower than estimated, negative if faster."""
        self._clear()

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Add an observation. Durations below one microsecond count as one microsecond.

        Args:
            features: amounts of work, as many as coefficients.
            seconds: measured duration.
        """
        row, seconds = tuple(features), max(seconds, 1e-6)
        if self._last:
            self._note_surprise(seconds / max(self.seconds(row), 1e-9))
        self._last.append((row, seconds))
        if abs(self._surprises) >= _SURPRISES:
            self._surprises = 0
            self._clear()
            for earlier in self._last:
                self._add(*earlier)
        else:
            self._add(row, seconds)
        self._fitted = self._fit()

    def seconds(self, features: Sequence[float]) -> float:
        """Estimate the duration in seconds for the given features."""
        return _dot(self._fitted, features)

    def _clear(self) -> None:
        size = len(self._prior)
        self._xx = [[0.0] * size for _ in range(size)]
        self._xy = [0.0] * size
        self._weight = 0.0
        self._ratio = 0.0

    def _add(self, row: tuple[float, ...], seconds: float) -> None:
        weight = 1.0 / seconds**2  # relative errors
        for i, a in enumerate(row):
            self._xy[i] = _FADE * self._xy[i] + weight * a * seconds
            for j, b in enumerate(row):
                self._xx[i][j] = _FADE * self._xx[i][j] + weight * a * b
        self._weight = _FADE * self._weight + 1.0
        self._ratio = _FADE * self._ratio + seconds / max(_dot(self._prior, row), 1e-12)

    def _note_surprise(self, ratio: float) -> None:
        if 1 / _SURPRISE < ratio < _SURPRISE:
            self._surprises = 0
        elif ratio > 1:
            self._surprises = max(self._surprises, 0) + 1
        else:
            self._surprises = min(self._surprises, 0) - 1

    def _fit(self) -> tuple[float, ...]:
        """Fit the coefficients; negative ones are set to zero, and the others are refitted."""
        active = list(range(len(self._prior)))
        while True:
            fitted = self._fit_over(active)
            negative = [i for i in active if fitted[i] < 0]
            if not negative:
                return fitted
            active = [i for i in active if i not in negative]

    def _fit_over(self, active: list[int]) -> tuple[float, ...]:
        scale = self._ratio / self._weight
        rows: list[list[float]] = []
        for place, i in enumerate(active):
            row = [self._xx[i][j] for j in active]
            pull = _PRIOR_WEIGHT * row[place] + 1e-30  # positive even if the feature was always zero
            row[place] += pull
            rows.append([*row, self._xy[i] + pull * self._prior[i] * scale])
        fitted = [0.0] * len(self._prior)
        for i, value in zip(active, _eliminate(rows), strict=True):
            fitted[i] = value
        return tuple(fitted)


def _dot(coefficients: Sequence[float], features: Sequence[float]) -> float:
    return sum(c * f for c, f in zip(coefficients, features, strict=True))


def _eliminate(rows: list[list[float]]) -> list[float]:
    """Solve a small symmetric positive definite system, given as [A | b]."""
    size = len(rows)
    for i in range(size):
        for r in range(i + 1, size):
            factor = rows[r][i] / rows[i][i]
            for c in range(i, size + 1):
                rows[r][c] -= factor * rows[i][c]
    solved = [0.0] * size
    for i in range(size - 1, -1, -1):
        known = sum(rows[i][c] * solved[c] for c in range(i + 1, size))
        solved[i] = (rows[i][size] - known) / rows[i][i]
    return solved
