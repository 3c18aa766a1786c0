"""Git commit of the measured source."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def commit() -> str:
    """Return the commit hash of the working tree, with `+` appended if it has uncommitted changes."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"
