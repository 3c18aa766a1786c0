"""Creates, enters, mounts and removes the cgroups of a node."""

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvferry.core.clock import Clock
from kvferry.core.errors import Unavailable

ROOT = Path("/sys/fs/cgroup")
_V1 = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "systemd")
_REMOVE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Cgroups:
    """The cgroups of a node: one in each hierarchy (version 1, hybrid), or a single cgroup (version 2)."""

    name: str
    root: Path = ROOT

    @property
    def unified(self) -> bool:
        """Whether the machine uses only cgroup version 2."""
        return (self.root / "cgroup.controllers").exists()

    @property
    def folders(self) -> list[Path]:
        """All folders of the node's cgroups; creating the first one reserves the name."""
        if self.unified:
            return [self.root / self.name]
        hierarchies = [name for name in (*_V1, "unified") if (self.root / name).is_dir()]
        return [self.root / name / self.name for name in hierarchies]

    def claim(self) -> bool:
        """Create the cgroups; return false if they belong to a different process."""
        first, *others = self.folders
        try:
            first.mkdir()
        except FileExistsError:
            if not self._is_stale():
                return False
        for folder in others:
            folder.mkdir(exist_ok=True)
        for folder in self.folders:
            if folder.parent.name == "cpuset":  # a new cpuset is empty, and processes cannot enter an empty cpuset
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (folder / name).write_text((folder.parent / name).read_text())
        if self.unified:
            offered = (self.root / "cgroup.controllers").read_text().split()
            with suppress(OSError):
                (self.root / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in offered))
        return True

    def entering(self, *, inner: bool) -> tuple[str, ...]:
        """Return a command prefix that runs a command in the cgroups.

        Args:
            inner: whether the node has started. In version 2 a cgroup cannot have both processes and child cgroups, so
                a started node's processes are in a leaf.
        """
        places = [folder / "init" if self.unified and inner else folder for folder in self.folders]
        joins = "; ".join(f"echo $$ > {place}/cgroup.procs" for place in places)
        return ("sh", "-ec", f'{joins}; exec "$@"', "sh")

    def mounting(self) -> list[str]:
        """Return the shell commands that mount the node's cgroups at the usual path inside its namespaces."""
        if self.unified:  # written according to the documentation; only version 1 has been tested
            return [
                f"mount -t cgroup2 cgroup2 {self.root}",
                f"mkdir -p {self.root}/init",
                f"echo $$ > {self.root}/init/cgroup.procs",
                f"sed 's/[^ ]*/+&/g' {self.root}/cgroup.controllers > {self.root}/cgroup.subtree_control",
            ]
        lines = [f"mount -t tmpfs tmpfs {self.root}"]
        for folder in self.folders:
            name = folder.parent.name
            if name in _V1:
                options = "none,name=systemd" if name == "systemd" else name
                lines.append(f"mkdir {folder.parent} && mount -t cgroup -o {options} cgroup {folder.parent}")
        return lines

    def remove(self, clock: Clock) -> None:
        """Remove all cgroups; retry, since the kernel may need time after the last process has exited.

        Raises:
            Unavailable: a cgroup is still in use.
        """
        pause = threading.Event()
        deadline = clock.monotonic() + _REMOVE_SECONDS
        while left := self._sweep():
            if clock.monotonic() > deadline:
                raise Unavailable(f"cgroups are still there after {_REMOVE_SECONDS:.0f} s: {', '.join(left)}")
            pause.wait(0.05)

    def _sweep(self) -> list[str]:
        for folder in self.folders:
            for path, _, _ in os.walk(folder, topdown=False):
                with suppress(OSError):
                    os.rmdir(path)
        return [str(folder) for folder in self.folders if folder.exists()]

    def _is_stale(self) -> bool:
        """Return whether the cgroups have no processes, as after their creator was killed before it removed them."""
        return not any(
            procs.read_text().strip()
            for folder in self.folders
            if folder.exists()
            for procs in folder.rglob("cgroup.procs")
        )
