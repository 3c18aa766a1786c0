"""The binaries of the local Kubernetes: found in $KUBEBUILDER_ASSETS or the user's cache, else built with Go."""

import fcntl
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.config import cache_dir, child_environment, environment
from kvferry.core.errors import Unavailable, UsageError
from kvferry.testing.kube import recipes, toolchain
from kvferry.testing.kube.recipes import Build, Recipes

_BUILD_SECONDS = 3600.0
_LOCK_SECONDS = 3600.0
_JOBS = 2
"""Two at a time: linking one of these takes almost 2 GiB."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Assets:
    """A folder with binaries."""

    folder: Path

    def path(self, name: str) -> Path:
        """Where a binary is.

        Raises:
            Unavailable: it is not there.
        """
        found = self.folder / name
        if not found.is_file():
            raise Unavailable(f"no {name} in {self.folder}; run `python -m kvferry.testing.kube build`")
        return found


def find(sets: Iterable[str], *, clock: Clock | None = None, say: Say = print, build: bool = True) -> Assets:
    """The binaries of some sets, built if they must be.

    Raises:
        UsageError: $KUBEBUILDER_ASSETS is set and lacks some.
        Unavailable: they cannot be built, or `build` says not to.
    """
    sets = tuple(sets)
    known = recipes.read()
    names = known.binaries(sets)
    if given := environment().get("KUBEBUILDER_ASSETS"):
        folder = Path(given)
        if lacking := missing(folder, names):
            raise UsageError(
                f"KUBEBUILDER_ASSETS={given} has no {', '.join(lacking)}; add them, or unset it to have them built",
                field="KUBEBUILDER_ASSETS",
            )
        return Assets(folder)
    folder = cache_dir() / "kube" / known.folder / "bin"
    if lacking := missing(folder, names):
        if not build:
            raise Unavailable(f"{folder} has no {', '.join(lacking)}; run `python -m kvferry.testing.kube build`")
        _build_missing(known, sets, folder, clock or SystemClock(), say)
    return Assets(folder)


def missing(folder: Path, names: Iterable[str]) -> list[str]:
    """Which of these are not in the folder as programs."""
    return [name for name in names if not os.access(folder / name, os.X_OK)]


def _build_missing(known: Recipes, sets: Sequence[str], folder: Path, clock: Clock, say: Say) -> None:
    go = toolchain.find(known.go)
    start = clock.monotonic()

    def progress(text: str) -> None:
        say(f"[{clock.monotonic() - start:5.0f} s] {text}")

    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / "lock", clock, progress):
        for build in known.of(sets):
            if missing(folder, build.binaries):  # whoever held the lock before us may have made them
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
            os.replace(Path(made) / name, folder / name)  # whole or not at all


@contextmanager
def _locked(path: Path, clock: Clock, say: Say) -> Iterator[None]:
    """One builder at a time; the kernel lets go of the lock when its holder ends."""
    deadline = clock.monotonic() + _LOCK_SECONDS
    pause = threading.Event()
    with path.open("w") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock.monotonic() > deadline:
                    raise Unavailable(f"another build has held {path} for {_LOCK_SECONDS:.0f} s") from None
                if not told:
                    say("another build is running; waiting for it")
                told = True
                pause.wait(0.5)
        yield
