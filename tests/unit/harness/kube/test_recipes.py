"""Recipes of the cluster's binaries, and the paths of their results."""

import shutil
from pathlib import Path

import pytest
from harness.kube import assets, recipes, toolchain

from kvferry.core.errors import Unavailable, UsageError

FAKE_GO = """#!/bin/sh
# Writes its arguments into the files that `go build` would make.
while [ $# -gt 0 ]; do
  case $1 in -o) out=$2; shift 2 ;; -p|-ldflags) shift 2 ;; build) shift ;; *) packages="$packages $1"; shift ;; esac
done
echo "$packages" >> "$BUILDS"
case $FAIL in *"$(basename "$out")"*) echo "cannot link" >&2; exit 2 ;; esac
case $out in
  */) for package in $packages; do made="$made $out$(basename "$package")"; done ;;
  *) made=$out ;;
esac
for one in $made; do echo "$GOFLAGS" > "$one"; chmod +x "$one"; done
"""


@pytest.fixture
def fake_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the `go` script records its builds."""
    (tmp_path / "tools").mkdir()
    go = tmp_path / "tools" / "go"
    go.write_text(FAKE_GO)
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{go.parent}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("BUILDS", str(tmp_path / "builds"))
    monkeypatch.setenv("FAIL", "none")
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    return tmp_path / "builds"


def test_every_set_names_its_binaries() -> None:
    read = recipes.read()
    assert set(read.binaries(["control"])) == {
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
        "kubectl",
        "etcd",
    }
    assert set(read.binaries(["node"])) == {"kubelet", "kube-proxy", "coredns", "pause"}
    assert set(read.binaries(["tools"])) == {"helm", "kwok"}
    assert {build.module for build in read.builds} == {path.name for path in recipes.BUILD.iterdir() if path.is_dir()}


def test_binaries_say_the_version_they_are_built_as() -> None:
    read = recipes.read()
    major, minor, _ = read.version.removeprefix("v").split(".")
    kubectl, helm = (next(one for one in read.builds if name in one.binaries) for name in ("kubectl", "helm"))
    words = kubectl.words("go", Path("/out"), 2)
    flags = words[words.index("-ldflags") + 1]
    assert f"-X k8s.io/client-go/pkg/version.gitVersion={read.version}" in flags
    assert helm.stamps["helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor"] == major
    assert helm.stamps["helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor"] == minor
    assert read.environment == {"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false -trimpath"}


def test_the_folder_changes_with_every_input(tmp_path: Path) -> None:
    copy = tmp_path / "build"
    shutil.copytree(recipes.BUILD, copy)
    before = recipes.read(copy)
    assert before.folder == recipes.read().folder
    (copy / "coredns" / "main.go").write_text("package main\n")
    assert recipes.read(copy).folder != before.folder


def test_missing_binaries_are_built_once(fake_go: Path) -> None:
    messages: list[str] = []
    found = assets.find(["control"], say=messages.append)
    assert found.path("etcd").read_text() == "-buildvcs=false -trimpath\n"
    assert len(fake_go.read_text().splitlines()) == 2
    assert "kube-apiserver" in messages[0]
    assert assets.find(["control"], say=messages.append) == found
    assert len(fake_go.read_text().splitlines()) == 2
    found.path("etcd").unlink()
    assets.find(["control"], say=messages.append)
    assert fake_go.read_text().splitlines()[2:] == [" go.etcd.io/etcd/server/v3"]
    with pytest.raises(Unavailable, match="no helm in"):
        found.path("helm")


def test_a_build_that_fails_reports_why_and_leaves_no_partial_result(
    fake_go: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "etcd")
    with pytest.raises(Unavailable, match=r"(?s)`go build` of etcd failed with 2:.*cannot link"):
        assets.find(["control"], say=lambda _: None)
    kept = next((tmp_path / "cache" / "kvferry" / "kube").iterdir())
    assert sorted(path.name for path in kept.iterdir()) == ["bin", "lock"]
    assert not (kept / "bin" / "etcd").exists()
    assert assets.missing(kept / "bin", ["kubectl", "etcd"]) == ["etcd"]


def test_building_can_be_turned_off(fake_go: Path) -> None:
    with pytest.raises(Unavailable, match="has no kube-apiserver"):
        assets.find(["control"], build=False)
    assert not fake_go.exists()


def test_a_given_folder_must_be_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    for name in recipes.read().binaries(["control"]):
        (tmp_path / name).touch(0o755)
    assert assets.find(["control"]).folder == tmp_path
    (tmp_path / "etcd").chmod(0o644)
    with pytest.raises(UsageError, match="has no etcd; add them, or unset it"):
        assets.find(["control"])


def test_a_fetched_toolchain_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_args, **_kwargs: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    go = tmp_path / "kvferry" / "kube" / "go-1.2.3" / "go" / "bin" / "go"
    go.parent.mkdir(parents=True)
    go.touch()
    assert toolchain.find("1.2.3") == str(go)
