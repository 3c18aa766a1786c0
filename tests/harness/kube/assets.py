"""Provides the binaries of the local Kubernetes cluster: from $KUBEBUILDER_ASSETS or the user's cache, or else built
with Go."""

import fcntl
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.kube import recipes, toolchain
from harness.kube.recipes import Build, Recipes
from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import Unavailable, UsageError
from kvferry.core.process.config import cache_dir, child_environment, environment

_BUILD_SECONDS = 3600.0
_LOCK_SECONDS = 3600.0
_JOBS = 2
"""Number of parallel jobs of `go build`; linking one of these binaries takes almost 2 GiB."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Assets:
    """A folder with the binaries."""

    folder: Path

    def path(self, name: str) -> Path:
        """Return the path of the binary `name`.

        Raises:
            Unavailable: the folder does not contain the binary.
        """
        found = self.folder / name
        if not found.is_file():
            raise Unavailable(f"no {name} in {self.folder}; run `python -m harness.kube build`")
        return found


def find(sets: Iterable[str], *, clock: Clock | None = None, say: Say = print, build: bool = True) -> Assets:
    """Find the binaries of these sets; build missing binaries.

    Raises:
        UsageError: $KUBEBUILDER_ASSETS is set, but its folder lacks some of the binaries.
        Unavailable: binaries are missing, and they cannot be built or `build` is false.
    """
    sets = tuple(sets)
    known = recipes.read()
    names = known.binaries(sets)
    if given := environment().get("KUBEBUILDER_ASSETS"):
        folder = Path(given)
        if lacking := missing(folder, names):
            raise UsageError(
                f"KUBEBUILDER_ASSETS={given} has no {', '.join(lacking)}; add them, or unset it to build them",
                field="KUBEBUILDER_ASSETS",
            )
        return Assets(folder)
    folder = cache_dir() / "kube" / known.folder / "bin"
    if lacking := missing(folder, names):
        if not build:
            raise Unavailable(f"{folder} has no {', '.join(lacking)}; run `python -m harness.kube build`")
        _build_missing(known, sets, folder, clock or SystemClock(), say)
    return Assets(folder)


def missing(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the names of binaries that are not executable files in the folder."""
    return [name for name in names if not os.access(folder / name, os.X_OK)]


def _build_missing(known: Recipes, sets: Sequence[str], folder: Path, clock: Clock, say: Say) -> None:
    go = toolchain.find(known.go)
    start = clock.monotonic()

    def progress(text: str) -> None:
        say(f"[{clock.monotonic() - start:5.0f} s] {text}")

    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / "lock", clock, progress):
        for build in known.of(sets):
            if missing(
                folder, build.binaries
            ):  # another process may have built them while this one waited for the lock
                progress(f"building {', '.join(build.binaries)} with {go}")
                _build(known, build, go, folder)
    progress(f"built into {folder}")


def _build(known: Recipes, build: Build, go: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as made:
        done = subprocess.run(
            build.words(go, Path(made), _JOBS),
            cwd=recipes.BUILD / build.module,
            env=child_environment(known.environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_BUILD_SECONDS,
            check=False,
        )
        if done.returncode:
            tail = done.stdout.decode("utf-8", "replace")[-3000:]
            raise Unavailable(f"`go build` of {', '.join(build.binaries)} failed with {done.returncode}:\n{tail}")
        for name in build.binaries:
            os.replace(Path(made) / name, folder / name)  # atomic


@contextmanager
def _locked(path: Path, clock: Clock, say: Say) -> Iterator[None]:
    """Acquire the build lock for the `with` block; the kernel releases it when the process exits."""
    deadline = clock.monotonic() + _LOCK_SECONDS
    pause = threading.Event()
    with path.open("w") as file:
        is_logged = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock.monotonic() > deadline:
                    raise Unavailable(f"another build has held {path} for {_LOCK_SECONDS:.0f} s") from None
                if not is_logged:
                    say("another build is running; waiting for it")
                is_logged = True
                pause.wait(0.5)
        yield
