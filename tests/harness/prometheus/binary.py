"""Builds the Prometheus server from its Go module, once for each version and set of build files."""

import fcntl
import hashlib
import os
import subprocess
from pathlib import Path

from harness.kube import toolchain
from kvferry.core.errors import Unavailable
from kvferry.core.process.config import cache_dir, child_environment

BUILD = Path(__file__).parent / "build"
_PACKAGE = "github.com/prometheus/prometheus/cmd/prometheus"
_GO = "1.27.3"
_BUILD_SECONDS = 1800.0


def prometheus() -> Path:
    """Return the path of the server's binary; build it if it is missing, which takes minutes.

    Raises:
        Unavailable: there is no Go toolchain, or the build failed.
    """
    digest = hashlib.sha256(b"".join((BUILD / name).read_bytes() for name in ("go.mod", "go.sum"))).hexdigest()[:12]
    folder = cache_dir() / "prometheus" / digest
    binary = folder / "prometheus"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held until the process ends or the file is closed
        if not os.access(binary, os.X_OK):
            _build(binary)
    return binary


def _build(binary: Path) -> None:
    # Service discovery of clouds is left out: it is most of the code, and the tests scrape fixed addresses.
    command = [toolchain.find(_GO), "build", "-p", "2", "-tags", "remove_all_sd", "-ldflags", "-s -w"]
    part = binary.with_name("prometheus.part")
    done = subprocess.run(
        [*command, "-o", str(part), _PACKAGE],
        cwd=BUILD,
        env=child_environment({"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false -trimpath"}),
        capture_output=True,
        text=True,
        timeout=_BUILD_SECONDS,
        check=False,
    )
    if done.returncode:
        raise Unavailable(f"`go build` of Prometheus failed with {done.returncode}:\n{done.stderr[-3000:]}")
    os.replace(part, binary)
