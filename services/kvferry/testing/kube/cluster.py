"""A whole cluster in one folder: up, attach, down."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import KvferryError, Unavailable, UsageError
from kvferry.testing.kube import control_plane
from kvferry.testing.kube.assets import Assets
from kvferry.testing.kube.children import Children, State, log_tail

_CALL_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster."""

    folder: Path
    assets: Assets
    children: Children

    @property
    def kubeconfig(self) -> Path:
        """For clients: the administrator."""
        return self.folder / "kubeconfig"

    def kubectl(self, *words: object, stdin: str | None = None, seconds: float = _CALL_SECONDS) -> str:
        """Run kubectl; what it said.

        Raises:
            Unavailable: it failed; the message has what it complained of.
        """
        command = [str(self.assets.path("kubectl")), f"--kubeconfig={self.kubeconfig}", *map(str, words)]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=seconds, check=False)
        if done.returncode:
            raise Unavailable(f"kubectl {' '.join(map(str, words))}: {done.stderr.strip()}")
        return done.stdout

    def end(self) -> None:
        """End its processes; the folder stays."""
        self.children.end_all()

    def logs(self) -> Iterator[tuple[str, str]]:
        """The last lines of each process's log."""
        for path in sorted((self.folder / "log").glob("*.log")):
            yield path.stem, log_tail(self.folder, path.stem)


def up(folder: Path, assets: Assets, *, lasting: bool = False, clock: Clock | None = None) -> Cluster:
    """Start a cluster; a failed start leaves its logs and nothing else.

    Args:
        folder: new or empty; everything of the cluster lives there.
        lasting: it outlives this process.

    Raises:
        UsageError: the folder holds something.
        Unavailable: it does not start.
    """
    folder = _empty(folder)
    clock = clock or SystemClock()
    start = clock.monotonic()
    children = Children(folder, State(), clock, lasting)
    place = control_plane.loopback()
    children.state.url = place.url

    def reached(stage: str) -> None:
        children.state.seconds[stage] = round(clock.monotonic() - start, 2)

    try:
        api = control_plane.prepare(folder, place, children)
        reached("certificates")
        control_plane.start(folder, place, assets, children, api)
        reached("control plane")
        children.state.write(folder)
    except BaseException:
        with suppress(KvferryError):  # the first failure is the one to tell
            children.end_all()
        raise
    return Cluster(folder, assets, children)


@contextmanager
def running(folder: Path, assets: Assets, *, clock: Clock | None = None) -> Iterator[Cluster]:
    """A cluster until the block ends, however it or this process ends."""
    cluster = up(folder, assets, clock=clock)
    try:
        yield cluster
    finally:
        cluster.end()


def attach(folder: Path, assets: Assets, *, clock: Clock | None = None) -> Cluster:
    """A cluster that another process started.

    Raises:
        UsageError: there is none.
    """
    folder = folder.resolve()
    return Cluster(folder, assets, Children(folder, State.read(folder), clock or SystemClock(), lasting=True))


def down(folder: Path, *, clock: Clock | None = None) -> None:
    """End what `up` started and remove the folder.

    Raises:
        UsageError: there is no cluster.
        Unavailable: something does not end.
    """
    folder = folder.resolve()
    Children(folder, State.read(folder), clock or SystemClock()).end_all()
    shutil.rmtree(folder)


def _empty(folder: Path) -> Path:
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if os.listdir(folder):
        raise UsageError(
            f"{folder} is not empty; `python -m kvferry.testing.kube down` it, or name another", field="DIR"
        )
    (folder / "log").mkdir()
    return folder
