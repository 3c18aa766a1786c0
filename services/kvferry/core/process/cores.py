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


def core_groups(count: int, nodes: Path = Path("/sys/devices/system/node")) -> list[tuple[int, ...]]:
    """Divide the CPU cores of this process into equal groups, each on one NUMA node where the sizes allow it.

    Args:
        count: number of groups.
        nodes: the system's description of NUMA nodes.

    Returns:
        The cores of each group; empty groups, for all cores, where there are fewer cores than groups.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [()] * count
    node_of = {core: node for node, folder in enumerate(sorted(nodes.glob("node[0-9]*"))) for core in _cores_of(folder)}
    cores = sorted(os.sched_getaffinity(0), key=lambda core: (node_of.get(core, 0), core))
    each = len(cores) // count
    return [tuple(cores[i * each : (i + 1) * each]) for i in range(count)]


def _cores_of(node: Path) -> list[int]:
    """Return the cores of a NUMA node, from ranges such as "0-15,32-47"; empty if they cannot be read."""
    try:
        ranges = [part.split("-") for part in (node / "cpulist").read_text().strip().split(",") if part]
        return [core for part in ranges for core in range(int(part[0]), int(part[-1]) + 1)]
    except (OSError, ValueError):
        return []


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
