"""Fits a device profile to measured steps: non-negative least squares of relative errors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import UsageError
from kvferry.simulator.worker.device import DeviceProfile, StepWork

Measured = tuple[StepWork, float]
"""Work of a step, and its duration in seconds."""
_NAMES = ("step", "token", "kv_token", "pair")
_BASIC = (0, 1)
"""Columns of which at least one must have a coefficient."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted profile and its errors."""

    profile: DeviceProfile
    num_steps: int
    median_error: float
    """Median of |estimate - measured| / measured."""
    p90_error: float


def fit(measured: Sequence[Measured]) -> Fit:
    """Fit the coefficients of a profile to measured steps.

    Columns whose coefficient would be negative are removed one by one, the most negative first. One of the fixed time
    and the time per token stays, since a step takes time even if noise makes the other columns explain it better.

    Raises:
        UsageError: there are fewer steps than coefficients, or a duration is not positive.
    """
    if len(measured) < len(_NAMES):
        raise UsageError(f"{len(measured)} steps were measured; a fit needs at least {len(_NAMES)}", field="rows")
    seconds = np.array([duration for _, duration in measured])
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise UsageError("every measured duration must be a positive number of seconds", field="rows")
    rows = np.array([(1.0, work.tokens, work.kv_tokens, work.pairs) for work, _ in measured])
    found = _non_negative(rows / seconds[:, None])
    errors = np.abs(rows @ found / seconds - 1.0)
    coefficients = {name: float(value) for name, value in zip(_NAMES, found, strict=True)}
    return Fit(DeviceProfile(**coefficients), len(measured), float(np.median(errors)), float(np.percentile(errors, 90)))


def residuals(profile: DeviceProfile, measured: Sequence[Measured]) -> list[float]:
    """Return the ratio of measured to estimated duration of each step, for the jitter of a role."""
    return [seconds / profile.seconds(work) for work, seconds in measured]


def _non_negative(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Solve rows @ x = 1 for x >= 0. Columns are scaled to equal norms first."""
    scale = np.linalg.norm(rows, axis=0)
    active = [index for index in range(rows.shape[1]) if scale[index] > 0]
    found = np.zeros(rows.shape[1])
    while active:
        scaled = rows[:, active] / scale[active]
        solved = np.linalg.lstsq(scaled, np.ones(len(rows)), rcond=None)[0]
        lowest = int(np.argmin(solved))
        if solved[lowest] >= 0:
            found[active] = solved / scale[active]
            break
        is_last_basic = active[lowest] in _BASIC and sum(index in _BASIC for index in active) == 1
        del active[-1 if is_last_basic else lowest]
    return found
