"""What the local Kubernetes is built of, and with which words: tests/cluster/build, read."""

import hashlib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.bench.commit import ROOT

BUILD = ROOT / "tests" / "cluster" / "build"
SETS = ("control", "node", "tools")


@dataclass(frozen=True, slots=True)
class Build:
    """One call of `go build`."""

    of_set: str
    module: str
    """Folder with the go.mod."""
    packages: tuple[str, ...]
    output: str | None
    """The binary's name, where the package's own will not do."""
    stamps: Mapping[str, str]

    @property
    def binaries(self) -> tuple[str, ...]:
        """Names of what it makes."""
        return (self.output,) if self.output else tuple(package.rpartition("/")[2] for package in self.packages)

    def words(self, go: str, into: Path, jobs: int) -> list[str]:
        """The command; run it in the module's folder."""
        flags = " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in self.stamps.items())])
        target = str(into / self.output) if self.output else f"{into}/"
        return [go, "build", "-p", str(jobs), "-ldflags", flags, "-o", target, *self.packages]


@dataclass(frozen=True, slots=True)
class Recipes:
    """All of them, for one version of Kubernetes."""

    version: str
    fingerprint: str
    """Of every file that says what is built."""
    go: str
    """Toolchain to fetch where there is none."""
    environment: Mapping[str, str]
    builds: tuple[Build, ...]

    @property
    def folder(self) -> str:
        """Name of the folder that keeps what was built."""
        return f"{self.version}-{self.fingerprint}"

    def of(self, sets: Iterable[str]) -> list[Build]:
        """The builds of these sets, in order."""
        wanted = set(sets)
        return [build for build in self.builds if build.of_set in wanted]

    def binaries(self, sets: Iterable[str]) -> list[str]:
        """What these sets hold."""
        return [name for build in self.of(sets) for name in build.binaries]


def read(folder: Path = BUILD) -> Recipes:
    """The recipes in a folder."""
    said = tomllib.loads((folder / "recipes.toml").read_text("utf-8"))
    version: str = said["kubernetes"]
    major, minor, _ = version.removeprefix("v").split(".")
    words = {"version": version, "major": major, "minor": minor}

    def build(one: Mapping[str, Any]) -> Build:
        stamps = {k: v.format(**words) for k, v in said["stamps"].get(one.get("stamps"), {}).items()}
        return Build(one["set"], one["module"], tuple(one["packages"]), one.get("output"), stamps)

    builds = tuple(build(one) for one in said["build"])
    return Recipes(version, _fingerprint(folder), said["go"], said["environment"], builds)


def _fingerprint(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        content = path.read_bytes()
        found.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return found.hexdigest()[:12]
