"""Commands of the client programs; packages are fetched once into the user's cache."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from harness.go_binary import go_binary
from kvferry.core.errors import Unavailable
from kvferry.core.process.config import cache_dir

_HERE = Path(__file__).parent
_INSTALL_SECONDS = 300.0


def go_client() -> list[str]:
    """Return the command of the Go program.

    Raises:
        Unavailable: there is no Go toolchain, or the build failed.
    """
    return [str(go_binary(_HERE / "go", "openai-go-client"))]


def node_client() -> list[str]:
    """Return the command of the Node program.

    Raises:
        Unavailable: there is no Node, or npm cannot install the package.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise Unavailable("node and npm are not installed")
    sources = sorted((_HERE / "node").iterdir())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    kept = cache_dir() / "openai-node-client" / digest
    if not (kept / "node_modules").is_dir():
        part = kept.with_name(f"{digest}.{os.getpid()}")
        shutil.copytree(_HERE / "node", part)
        done = subprocess.run(
            [npm, "ci", "--no-audit", "--no-fund"],
            cwd=part,
            capture_output=True,
            text=True,
            timeout=_INSTALL_SECONDS,
            check=False,
        )
        if done.returncode:
            shutil.rmtree(part)
            raise Unavailable(f"npm ci failed with {done.returncode}: {done.stderr[-1000:]}")
        shutil.rmtree(kept, ignore_errors=True)
        os.replace(part, kept)
    return [node, str(kept / "client.mjs")]
