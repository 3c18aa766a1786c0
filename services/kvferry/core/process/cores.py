"""Counts the CPU cores that this process may use: its CPU affinity, limited by the quota of its cgroup.

In a container with a limit of 2 CPUs on a machine with 64 cores, `os.cpu_count()` is 64; 64 threads would be throttled.
"""

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Return the number of CPU cores that this process may use, at least 1.

    Args:
        cgroup: mount point of cgroup v1 or v2.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """Return the CPU quota in cores; `None` if it is unlimited or cannot be read."""
    try:
        if (cgroup / "cpu.max").is_file():
            given, period = (cgroup / "cpu.max").read_text().split()
        else:
            given = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        limit, span = float(given), float(period)  # "max" means no limit
    except (OSError, ValueError):
        return None
    return limit / span if limit > 0 and span > 0 else None
