"""The processor, as a measurement names it."""

import os
from pathlib import Path


def cpu_name() -> str:
    """The processor and how many of its threads we may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{name} x{len(os.sched_getaffinity(0))}"
