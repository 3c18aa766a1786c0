"""Builds a Go program for tests, once for each version of its files, into the user's cache."""

import fcntl
import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from harness.kube import toolchain
from kvferry.core.errors import Unavailable
from kvferry.core.process.config import cache_dir, child_environment

_GO = "1.27.3"
_BUILD_SECONDS = 1800.0


def go_binary(folder: Path, name: str, package: str = ".", *flags: str) -> Path:
    """Return the path of a program's binary; build it if it is missing, which can take minutes.

    Args:
        folder: folder of the Go module, with `go.mod` and `go.sum`.
        name: name of the binary and of its folder in the cache.
        package: the package to build.
        flags: further flags of `go build`.

    Raises:
        Unavailable: there is no Go toolchain, or the build failed.
    """
    sources = sorted(path for path in folder.iterdir() if path.suffix in {".go", ".mod", ".sum"})
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    kept = cache_dir() / name / digest
    kept.mkdir(parents=True, exist_ok=True)
    with (kept / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed or the process ends
        if not os.access(kept / name, os.X_OK):
            _build(folder, kept / name, package, flags)
    return kept / name


def _build(folder: Path, binary: Path, package: str, flags: Sequence[str]) -> None:
    part = binary.with_name("part")
    done = subprocess.run(
        [toolchain.find(_GO), "build", "-p", "2", "-ldflags", "-s -w", *flags, "-o", str(part), package],
        cwd=folder,
        env=child_environment({"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false -trimpath"}),
        capture_output=True,
        text=True,
        timeout=_BUILD_SECONDS,
        check=False,
    )
    if done.returncode:
        raise Unavailable(f"`go build` of {binary.name} failed with {done.returncode}:\n{done.stderr[-3000:]}")
    os.replace(part, binary)
