"""Hand-offs of the last minutes from gateways' counters. Pure.

A pool may have several gateways, and whoever asks its Service meets one or another. Each counts for itself, so that
only readings of one gateway may be compared.
"""

from collections import deque
from collections.abc import Mapping

WINDOW_SECONDS = 300.0
_MOST_GATEWAYS = 100
"""As many as a pool may have; whoever gives itself more names is not followed."""

_Readings = deque[tuple[float, Mapping[str, int]]]


class RecentHandoffs:
    """Of one pool."""

    def __init__(self) -> None:
        self._of: dict[str, _Readings] = {}

    def take(self, gateway: str, at: float, totals: Mapping[str, int]) -> dict[str, int]:
        """Note what a gateway has counted since it started; all gateways' hand-offs of the last minutes, by outcome.

        Args:
            gateway: which process; another one begins at nought.
            at: when, by the caller's clock.
        """
        if gateway not in self._of and len(self._of) >= _MOST_GATEWAYS:
            del self._of[next(iter(self._of))]
        seen = self._of.setdefault(gateway, deque())
        if seen and any(totals.get(outcome, 0) < number for outcome, number in seen[-1][1].items()):
            seen.clear()  # it does not say who it is, and has started anew
        seen.append((at, totals))
        for name, readings in list(self._of.items()):
            while len(readings) > 2 and at - readings[1][0] > WINDOW_SECONDS:
                readings.popleft()
            if at - readings[-1][0] > WINDOW_SECONDS:
                del self._of[name]
        recent: dict[str, int] = {}
        for readings in self._of.values():
            for outcome, number in readings[-1][1].items():
                recent[outcome] = recent.get(outcome, 0) + number - readings[0][1].get(outcome, 0)
        return recent
