"""Reads the build recipes of the local Kubernetes binaries from tests/cluster/build."""

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
    """A call of `go build`."""

    of_set: str
    module: str
    """Folder of the Go module."""
    packages: tuple[str, ...]
    output: str | None
    """Name of the binary; `None` selects the name of the package."""
    stamps: Mapping[str, str]

    @property
    def binaries(self) -> tuple[str, ...]:
        """Names of the binaries that this build creates."""
        return (self.output,) if self.output else tuple(package.rpartition("/")[2] for package in self.packages)

    def words(self, go: str, into: Path, jobs: int) -> list[str]:
        """Return the `go build` command, which must be run in the module's folder."""
        flags = " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in self.stamps.items())])
        target = str(into / self.output) if self.output else f"{into}/"
        return [go, "build", "-p", str(jobs), "-ldflags", flags, "-o", target, *self.packages]


@dataclass(frozen=True, slots=True)
class Recipes:
    """All builds for one version of Kubernetes."""

    version: str
    fingerprint: str
    """Hash of all files that define the builds."""
    go: str
    """Version of the Go toolchain to fetch if none is installed."""
    environment: Mapping[str, str]
    builds: tuple[Build, ...]

    @property
    def folder(self) -> str:
        """Name of the cache folder for these builds."""
        return f"{self.version}-{self.fingerprint}"

    def of(self, sets: Iterable[str]) -> list[Build]:
        """Return the builds for these sets, in order."""
        wanted = set(sets)
        return [build for build in self.builds if build.of_set in wanted]

    def binaries(self, sets: Iterable[str]) -> list[str]:
        """Return the names of the binaries in these sets."""
        return [name for build in self.of(sets) for name in build.binaries]


def read(folder: Path = BUILD) -> Recipes:
    """Read the recipes in a folder."""
    table = tomllib.loads((folder / "recipes.toml").read_text("utf-8"))
    version: str = table["kubernetes"]
    major, minor, _ = version.removeprefix("v").split(".")
    words = {"version": version, "major": major, "minor": minor}

    def build(one: Mapping[str, Any]) -> Build:
        stamps = {k: v.format(**words) for k, v in table["stamps"].get(one.get("stamps"), {}).items()}
        return Build(one["set"], one["module"], tuple(one["packages"]), one.get("output"), stamps)

    builds = tuple(build(one) for one in table["build"])
    return Recipes(version, _fingerprint(folder), table["go"], table["environment"], builds)


def _fingerprint(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        content = path.read_bytes()
        found.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return found.hexdigest()[:12]
