"""A line fitted online to durations, with exponential forgetting."""

from dataclasses import dataclass

_DECAY = 0.98
"""Weight of the past at each observation: the last 50 observations dominate."""
_MIN_SPREAD = 0.05
"""Minimum standard deviation of the amounts, as a fraction of their mean, for a slope to be fitted."""
_OUTLIER = 8.0
"""A duration that differs from the fit by more than this factor is clamped to this factor: pauses of a
process (compilation, swapping) do not predict the duration of the next request."""
_NUM_TRUSTED = 5
"""Minimum number of observations before outliers are clamped."""


@dataclass(slots=True)
class FittedLine:
    """Weighted least squares fit of seconds = intercept + slope * amount, both at least 0.

    As long as the amounts hardly differ, the slope is an assumption: `slope_share` of the mean duration per mean
    amount. 1 gives a line through the origin (work proportional to the amount), 0 a constant.
    """

    slope_share: float
    count: int = 0
    """Number of observations."""
    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _line: tuple[float, float] | None = (0.0, 0.0)
    """The fitted line (constant, slope); `None` if there are observations that it does not include."""

    def add(self, amount: float, seconds: float) -> None:
        """Add an observation; one without an amount or with a negative duration is ignored.

        Args:
            amount: amount of work, for example a number of tokens.
            seconds: its duration.
        """
        if amount <= 0 or seconds < 0:
            return
        if self.count >= _NUM_TRUSTED:
            expected = self.predict(amount)
            seconds = min(max(seconds, expected / _OUTLIER), expected * _OUTLIER) if expected > 0 else seconds
        self.count += 1
        self._weight = self._weight * _DECAY + 1
        self._x = self._x * _DECAY + amount
        self._y = self._y * _DECAY + seconds
        self._xx = self._xx * _DECAY + amount * amount
        self._xy = self._xy * _DECAY + amount * seconds
        self._line = None

    def predict(self, amount: float) -> float:
        """Return the expected time for an amount in seconds, at least 0; 0 without observations.

        Args:
            amount: amount of work, in the unit of `add`.
        """
        intercept, slope = self.line()
        return intercept + slope * amount

    @property
    def mean_amount(self) -> float:
        """Mean of the amounts; 0 without observations."""
        return self._x / self._weight if self.count else 0.0

    def line(self) -> tuple[float, float]:
        """Return (intercept in seconds, slope in seconds per unit of the amount)."""
        if self._line is None:
            self._line = self._fit()
        return self._line

    def _fit(self) -> tuple[float, float]:
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        if variance <= (_MIN_SPREAD * x) ** 2:
            slope = self.slope_share * y / x
            return (1 - self.slope_share) * y, slope
        slope = (self._xy / self._weight - x * y) / variance
        if slope <= 0:
            return y, 0.0
        intercept = y - slope * x
        return (intercept, slope) if intercept >= 0 else (0.0, self._xy / self._xx)
