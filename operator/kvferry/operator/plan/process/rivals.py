"""Detection of a second operator that reconciles the same pools under a different lease. Pure.

Operators with one lease take turns. Operators with different leases, for example two releases of the chart, would both
write the same objects. Every status names the lease of the operator that wrote it, so at its start an operator looks
for statuses of other operators that are still being renewed. As in leader election, it measures by its own clock.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

RENEWED_SECONDS = 60.0
"""Maximum time in seconds between two writes of a pool's status by a working operator."""
_SILENT_SECONDS = RENEWED_SECONDS + 15.0


@dataclass(slots=True)
class Rivals:
    """Search for rivals of the operator with the lease `own` (namespace/name)."""

    own: str
    began: float
    """Time when the search began, in seconds by a monotonic clock."""
    _first: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    """Operator and time of the observation in each pool's status, when it was first seen."""

    def look(self, pools: Iterable[Mapping[str, Any]], now: float, wall: float) -> tuple[str, bool]:
        """Check all pools; return a message about a rival (empty if there is none) and whether the rival is certainly
        running, since it has written a status since the search began.

        Args:
            pools: InferencePool objects.
            now: monotonic time in seconds, by the clock of `began`.
            wall: wall-clock time in seconds since the epoch, to ignore old statuses at the first look.
        """
        for pool in pools:
            meta, status = pool["metadata"], pool.get("status") or {}
            operator, at = str(status.get("operator") or ""), str(status.get("observedAt") or "")
            key = str(meta["namespace"]), str(meta["name"])
            if not operator or operator == self.own or not at:
                continue
            reason = (
                f"pool {'/'.join(key)} is reconciled by the operator with the lease {operator}, which wrote its "
                f"status at {at}; this operator has the lease {self.own}. Uninstall one of them, or assign each its "
                "own namespaces (--namespace; operator.namespaces in the chart)"
            )
            is_new = key not in self._first
            first = self._first.setdefault(key, (operator, at))
            if not is_new and first != (operator, at):
                return reason, True
            if now - self.began < _SILENT_SECONDS and wall - _seconds(at) < _SILENT_SECONDS:
                return reason, False
        return "", False


def _seconds(stamp: str) -> float:
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return 0.0
