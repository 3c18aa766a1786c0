"""Which source a measurement was made with."""

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
