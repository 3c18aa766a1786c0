"""Pearson's chi-square test of counted outcomes."""

from collections.abc import Mapping
from statistics import NormalDist

LEVEL = 0.001
"""Significance level: probability over seeds that the test rejects a correct distribution."""


def chi_square(counts: Mapping[object, int], expected: Mapping[object, float]) -> tuple[float, float]:
    """Return the statistic of Pearson's test, and its critical value at `LEVEL` (Wilson and Hilferty, 1931).

    Args:
        counts: number of draws by outcome.
        expected: probability by outcome. Outcomes that are expected less than five times are counted as one.
    """
    assert set(counts) <= {outcome for outcome, p in expected.items() if p > 0}, "an impossible outcome"
    total = sum(counts.values())
    cells = [(counts.get(o, 0), p * total) for o, p in expected.items() if p * total >= 5]
    rest = total - sum(p for _, p in cells)
    if rest > 1e-6 * total:
        cells.append((total - sum(c for c, _ in cells), rest))
    freedom = len(cells) - 1
    share = 2.0 / (9.0 * freedom)
    critical = freedom * (1.0 - share + NormalDist().inv_cdf(1.0 - LEVEL) * share**0.5) ** 3
    return sum((c - e) ** 2 / e for c, e in cells), critical
