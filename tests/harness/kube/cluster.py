"""Starts, attaches to and stops a whole cluster, with all files in one folder."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.kube import box, control_plane, node
from harness.kube.assets import Assets
from harness.kube.children import Children, State, log_tail
from harness.kube.control_plane import PlaneOptions
from harness.kube.runtime import Runtime
from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import KvferryError, Unavailable, UsageError
from kvferry.model.catalog import embedded
from kvferry.model.fetch import fetch

_CALL_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster and its command-line tools."""

    folder: Path
    assets: Assets
    children: Children

    @property
    def kubeconfig(self) -> Path:
        """Path of the administrator's kubeconfig."""
        return self.folder / "kubeconfig"

    def kubectl(self, *words: object, stdin: str | None = None, seconds: float = _CALL_SECONDS) -> str:
        """Run kubectl and return its output.

        Raises:
            Unavailable: kubectl failed or timed out; the message contains its error output.
        """
        return self._call("kubectl", words, stdin, seconds)

    def helm(self, *words: object, seconds: float = _CALL_SECONDS) -> str:
        """Run helm and return its output.

        Raises:
            Unavailable: helm failed or timed out, or it has not been built (set `tools`).
        """
        return self._call("helm", words, None, seconds)

    def _call(self, tool: str, words: tuple[object, ...], stdin: str | None, seconds: float) -> str:
        command = [str(self.assets.path(tool)), f"--kubeconfig={self.kubeconfig}", *map(str, words)]
        command_line = f"{tool} {' '.join(map(str, words))}"
        try:
            done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{command_line}: no answer after {seconds:.0f} s") from None
        if done.returncode:
            raise Unavailable(f"{command_line}: {done.stderr.strip()}")
        return done.stdout

    @property
    def box(self) -> box.Box:
        """The node's box.

        Raises:
            UsageError: the cluster has no node.
        """
        state = self.children.state.box
        if state is None:
            raise UsageError(f"the cluster in {self.folder} has no node; start it with --node", field="DIR")
        return box.attached(state)

    def load(self, archive: Path) -> None:
        """Import an image into the node from an OCI archive."""
        Runtime(self.box).load(archive)

    def keep_model(self, name: str) -> None:
        """Copy a model from the catalog into the model cache used by the node's pods (`box.MODELS`).

        Raises:
            UnknownModel: the model is not in the catalog.
            ModelFileError: the model cannot be fetched.
        """
        file = fetch(embedded(name))
        kept = self.folder / "models" / "kvferry" / "models" / name / file.name
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, kept)  # a copy, since pods must not access the user's file

    def end(self) -> None:
        """Kill the cluster's processes and remove its node, but keep the folder."""
        _end(self.children)

    def logs(self) -> Iterator[tuple[str, str]]:
        """Yield (name, last lines of the log) of each process."""
        for path in sorted((self.folder / "log").glob("*.log")):
            yield path.stem, log_tail(self.folder, path.stem)


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Options of the cluster's node."""

    host_folders: Sequence[Path] = ()
    """Folders of the host that containers with the runtime `host` can access."""


def up(
    folder: Path,
    assets: Assets,
    *,
    node_options: NodeOptions | None = None,
    plane: PlaneOptions | None = None,
    lasting: bool = False,
    clock: Clock | None = None,
) -> Cluster:
    """Start a cluster. After a failed start, only the logs remain.

    Args:
        folder: new or empty folder for all files of the cluster.
        node_options: options of the node; `None` starts no node, so that pods stay pending.
        plane: options of the control plane; only without a node.
        lasting: whether the cluster continues after this process exits.

    Raises:
        UsageError: the folder is not empty.
        Unavailable: the cluster does not start.
    """
    folder = _empty(folder)
    children = Children(folder, State(), clock or SystemClock(), lasting)
    try:
        _start(folder, assets, children, node_options, plane)
    except BaseException:
        with suppress(KvferryError):  # report the first failure
            _end(children)
        raise
    return Cluster(folder, assets, children)


def _start(
    folder: Path, assets: Assets, children: Children, node_options: NodeOptions | None, plane: PlaneOptions | None
) -> None:
    start = children.clock.monotonic()

    def reached(stage: str) -> None:
        children.state.seconds[stage] = round(children.clock.monotonic() - start, 2)

    home = None
    place = control_plane.loopback(plane)
    if node_options is not None:
        home = box.start(folder, children)
        place = home.place
        reached("box")
    children.state.url = place.url
    api = control_plane.prepare(folder, place, children)
    control_plane.start(folder, place, assets, children)
    reached("processes")
    if node_options is not None and home is not None:  # while the API server starts
        node.start_runtime(folder, home, assets, children, node_options.host_folders)
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
    node_options: NodeOptions | None = None,
    plane: PlaneOptions | None = None,
    clock: Clock | None = None,
) -> Iterator[Cluster]:
    """Start a cluster and yield it; it is stopped when the `with` block or this process ends."""
    cluster = up(folder, assets, node_options=node_options, plane=plane, clock=clock)
    try:
        yield cluster
    finally:
        cluster.end()


def attach(folder: Path, assets: Assets, *, clock: Clock | None = None) -> Cluster:
    """Attach to a cluster that a different process started.

    Raises:
        UsageError: the folder has no cluster.
    """
    folder = folder.resolve()
    return Cluster(folder, assets, Children(folder, State.read(folder), clock or SystemClock(), lasting=True))


def down(folder: Path, *, clock: Clock | None = None) -> None:
    """Stop a cluster that `up` started, and remove its folder.

    Raises:
        UsageError: the folder has no cluster.
        Unavailable: a process cannot be stopped.
    """
    folder = folder.resolve()
    _end(Children(folder, State.read(folder), clock or SystemClock()))
    shutil.rmtree(folder)


def _empty(folder: Path) -> Path:
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if os.listdir(folder):
        raise UsageError(f"{folder} is not empty; stop its cluster (`down`) or use another folder", field="DIR")
    (folder / "log").mkdir()
    return folder
