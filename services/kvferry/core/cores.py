"""How many cores this process may really use: those it may run on, and no more than its control group pays for.

A container with a limit of two CPUs on a machine of sixty-four sees sixty-four; as many threads would be stopped for
most of each period.
"""

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """At least 1.

    Args:
        cgroup: where control groups are mounted, either version.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """Cores' worth of time a second; `None`: no limit, or none that can be read."""
    try:
        if (cgroup / "cpu.max").is_file():
            given, period = (cgroup / "cpu.max").read_text().split()
        else:
            given = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        limit, span = float(given), float(period)  # "max" where there is no limit
    except (OSError, ValueError):
        return None
    return limit / span if limit > 0 and span > 0 else None
