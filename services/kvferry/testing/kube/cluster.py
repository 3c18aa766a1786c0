"""A whole cluster in one folder: up, attach, down."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import KvferryError, Unavailable, UsageError
from kvferry.model.catalog import embedded
from kvferry.model.fetch import fetch
from kvferry.testing.kube import box, control_plane, node
from kvferry.testing.kube.assets import Assets
from kvferry.testing.kube.children import Children, State, log_tail
from kvferry.testing.kube.control_plane import PlaneWish
from kvferry.testing.kube.runtime import Runtime

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
            Unavailable: it failed, or took longer; the message has what it complained of.
        """
        return self._call("kubectl", words, stdin, seconds)

    def helm(self, *words: object, seconds: float = _CALL_SECONDS) -> str:
        """Run helm; what it said.

        Raises:
            Unavailable: as of `kubectl`; or nobody has built it (set `tools`).
        """
        return self._call("helm", words, None, seconds)

    def _call(self, tool: str, words: tuple[object, ...], stdin: str | None, seconds: float) -> str:
        command = [str(self.assets.path(tool)), f"--kubeconfig={self.kubeconfig}", *map(str, words)]
        said = f"{tool} {' '.join(map(str, words))}"
        try:
            done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{said}: no answer after {seconds:.0f} s") from None
        if done.returncode:
            raise Unavailable(f"{said}: {done.stderr.strip()}")
        return done.stdout

    @property
    def box(self) -> box.Box:
        """The node's.

        Raises:
            UsageError: the cluster has no node.
        """
        state = self.children.state.box
        if state is None:
            raise UsageError(f"the cluster in {self.folder} has no node; start it with --node", field="DIR")
        return box.attached(state)

    def load(self, archive: Path) -> None:
        """Give the node an image, from an OCI archive."""
        Runtime(self.box).load(archive)

    def keep_model(self, name: str) -> None:
        """Put a model of the catalog where the node's pods find it as their cache (`box.MODELS`).

        Raises:
            UnknownModel: the catalog has none of this name.
            ModelFileError: it cannot be fetched.
        """
        file = fetch(embedded(name))
        kept = self.folder / "models" / "kvferry" / "models" / name / file.name
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, kept)  # not a link: pods are not to meet the user's own file

    def end(self) -> None:
        """End its processes, and its node with all that it made; the folder stays."""
        _end(self.children)

    def logs(self) -> Iterator[tuple[str, str]]:
        """The last lines of each process's log."""
        for path in sorted((self.folder / "log").glob("*.log")):
            yield path.stem, log_tail(self.folder, path.stem)


@dataclass(frozen=True, slots=True)
class NodeWish:
    """That the cluster has a node."""

    host_folders: Sequence[Path] = ()
    """What containers of the runtime `host` see of this machine."""


def up(
    folder: Path,
    assets: Assets,
    *,
    wish: NodeWish | None = None,
    plane: PlaneWish | None = None,
    lasting: bool = False,
    clock: Clock | None = None,
) -> Cluster:
    """Start a cluster; a failed start leaves its logs and nothing else.

    Args:
        folder: new or empty; everything of the cluster lives there.
        wish: for a node; else pods stay pending.
        plane: of the control plane; only without a node.
        lasting: it outlives this process.

    Raises:
        UsageError: the folder holds something.
        Unavailable: it does not start.
    """
    folder = _empty(folder)
    children = Children(folder, State(), clock or SystemClock(), lasting)
    try:
        _start(folder, assets, children, wish, plane)
    except BaseException:
        with suppress(KvferryError):  # the first failure is the one to tell
            _end(children)
        raise
    return Cluster(folder, assets, children)


def _start(folder: Path, assets: Assets, children: Children, wish: NodeWish | None, plane: PlaneWish | None) -> None:
    start = children.clock.monotonic()

    def reached(stage: str) -> None:
        children.state.seconds[stage] = round(children.clock.monotonic() - start, 2)

    home = None
    place = control_plane.loopback(plane)
    if wish is not None:
        home = box.start(folder, children)
        place = home.place
        reached("box")
    children.state.url = place.url
    api = control_plane.prepare(folder, place, children)
    control_plane.start(folder, place, assets, children)
    reached("processes")
    if wish is not None and home is not None:  # while the API server starts
        node.start_runtime(folder, home, assets, children, wish.host_folders)
        reached("containerd")
    control_plane.wait(children, api)
    reached("control plane")
    if home is not None:
        node.start(folder, home, assets, children, api)
        Cluster(folder, assets, children).kubectl("apply", "-f", "-", stdin=json.dumps(node.runtime_class()))
        reached("node")
    children.state.write(folder)


def _end(children: Children) -> None:
    if children.state.box is not None:
        box.stop(children.state.box, children)
    else:
        children.end_all()


@contextmanager
def running(
    folder: Path,
    assets: Assets,
    *,
    wish: NodeWish | None = None,
    plane: PlaneWish | None = None,
    clock: Clock | None = None,
) -> Iterator[Cluster]:
    """A cluster until the block ends, however it or this process ends."""
    cluster = up(folder, assets, wish=wish, plane=plane, clock=clock)
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
    _end(Children(folder, State.read(folder), clock or SystemClock()))
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
