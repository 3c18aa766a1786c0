"""What a measurement says about where it was made: the commit and the processor."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def commit() -> str:
    """Of the working tree; `+` when it differs from what was committed."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def cpu_name() -> str:
    """The processor and how many of its threads we may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{name} x{len(os.sched_getaffinity(0))}"
