"""Numbers of recent hand-offs, computed from the counters of gateways. Pure.

A pool may have several gateways behind one Service, and a request reaches any of them. Every gateway has its own
counters, so only readings of the same gateway are compared.
"""

from collections import deque
from collections.abc import Mapping

WINDOW_SECONDS = 300.0
_MAX_GATEWAYS = 100
"""Maximum number of gateways per pool; readings of additional gateways replace the oldest."""

_Readings = deque[tuple[float, Mapping[str, int]]]


class RecentHandoffs:
    """Numbers of recent hand-offs in one pool."""

    def __init__(self) -> None:
        self._of: dict[str, _Readings] = {}

    def take(self, gateway: str, at: float, totals: Mapping[str, int]) -> dict[str, int]:
        """Add a reading; return the hand-offs of all gateways in the window, by outcome.

        Args:
            gateway: name of the gateway process that has these counters.
            at: time of the reading in seconds, by the same clock for all readings.
            totals: number of hand-offs since the gateway's start, by outcome.
        """
        if gateway not in self._of and len(self._of) >= _MAX_GATEWAYS:
            del self._of[next(iter(self._of))]
        seen = self._of.setdefault(gateway, deque())
        if seen and any(totals.get(outcome, 0) < number for outcome, number in seen[-1][1].items()):
            seen.clear()  # Counters decreased: a gateway without a name has restarted.
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
