"""Describes the processor of this machine, for reports of measurements."""

import os
from pathlib import Path


def cpu_name() -> str:
    """Return the processor's model name and the number of usable hardware threads."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{name} x{len(os.sched_getaffinity(0))}"
