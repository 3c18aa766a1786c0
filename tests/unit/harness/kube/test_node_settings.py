"""Settings of the node's programs, and their cgroups."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from harness.kube import box, control_plane, node, runtime
from harness.kube.box import Box
from harness.kube.cgroups import Cgroups

from kvferry.core.clock import SystemClock
from kvferry.core.errors import Unavailable

HERE = Path("/where")


@pytest.mark.parametrize(
    ("second", "plugin"), [(False, "io.containerd.grpc.v1.cri"), (True, "io.containerd.cri.v1.runtime")]
)
def test_containerd_has_two_runtimes_in_both_formats_of_its_file(second: bool, plugin: str) -> None:
    both = {"runc": ("/bin/runc", None), "host": ("/where/runc-host", HERE / "spec.json")}
    parsed = tomllib.loads(runtime.containerd_settings(HERE, both, second=second))
    runtimes = parsed["plugins"][plugin]["containerd"]["runtimes"]
    assert set(runtimes) == {"runc", "host"}
    assert runtimes["host"]["base_runtime_spec"] == "/where/spec.json"
    assert runtimes["host"]["options"]["BinaryName"] == "/where/runc-host"
    assert "base_runtime_spec" not in runtimes["runc"]
    assert parsed["plugins"][plugin]["restrict_oom_score_adj"] is True
    assert runtime.PAUSE_IMAGE in str(parsed["plugins"])


def test_a_folder_is_mounted_after_the_volumes_that_would_hide_it(tmp_path: Path) -> None:
    mounts = [{"destination": place} for place in ("/proc", "/tmp/checkout/.venv", "/usr", "/tmp", "/etc/hosts")]
    (tmp_path / "config.json").write_text(json.dumps({"mounts": mounts}))
    program, runc = tmp_path / "runc-host", tmp_path / "runc"
    program.write_text(runtime._RUNC_FOR_HOST.format(python=sys.executable, runc=runc))
    runc.write_text('#!/bin/sh\necho "$@"\n')
    for path in (program, runc):
        path.chmod(0o755)
    words = ["--root", "/run/runc", "create", "--bundle", str(tmp_path), "name"]
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == words
    places = [mount["destination"] for mount in json.loads((tmp_path / "config.json").read_text())["mounts"]]
    assert places == ["/proc", "/usr", "/tmp", "/etc/hosts", "/tmp/checkout/.venv"]


def test_host_containers_see_folders_read_only() -> None:
    plain: dict[str, list[dict[str, object]]] = {"mounts": [{"destination": "/run"}, {"destination": "/proc"}]}
    mounts = runtime.host_spec(plain, [Path("/models")])["mounts"]
    assert mounts[0] == {"destination": "/proc"}
    assert mounts[1:] == [{"destination": "/models", "type": "bind", "source": "/models", "options": ["rbind", "ro"]}]
    assert len(plain["mounts"]) == 2


def test_boxes_share_no_address() -> None:
    boxes = [Box(number) for number in range(1, box.MOST_BOXES + 1)]
    for kind in ("address", "near_address", "pod_cidr", "service_cidr", "near", "name"):
        assert len({getattr(one, kind) for one in boxes}) == len(boxes)
    assert all(len(one.near) < 16 for one in boxes), "the kernel allows 15 characters"
    assert boxes[0].place.first_service == "10.111.96.1"
    assert runtime.network(boxes[0])["plugins"][0]["ipam"]["ranges"][0][0]["gateway"] == "10.111.0.1"  # type: ignore[index]


def test_the_node_takes_many_pods_and_evicts_none() -> None:
    parsed = node.kubelet_settings(HERE, Box(1))
    assert parsed["maxPods"] == 110
    assert set(parsed["evictionHard"].values()) == {"0%"}  # type: ignore[attr-defined]


def test_loopback_ports_are_free_and_distinct() -> None:
    place = control_plane.loopback()
    assert len({place.api_port, place.etcd_port, place.peer_port}) == 3
    assert place.url == f"https://127.0.0.1:{place.api_port}"


@pytest.fixture
def hierarchies(tmp_path: Path) -> Path:
    """Files of cgroup version 1, with the unified hierarchy beside it."""
    for name in ("cpuset", "memory", "systemd", "unified"):
        (tmp_path / name).mkdir()
    (tmp_path / "cpuset" / "cpuset.cpus").write_text("0-1")
    (tmp_path / "cpuset" / "cpuset.mems").write_text("0")
    return tmp_path


def test_version_1_has_a_folder_in_each_hierarchy(hierarchies: Path) -> None:
    made = Cgroups("one", hierarchies)
    assert not made.unified
    assert made.claim()
    assert (hierarchies / "cpuset" / "one" / "cpuset.cpus").read_text() == "0-1"
    assert [folder.parent.name for folder in made.folders] == ["cpuset", "memory", "systemd", "unified"]
    mounting = "\n".join(made.mounting())
    assert "-o none,name=systemd" in mounting
    assert "unified" not in mounting
    assert f"{hierarchies}/memory/one/cgroup.procs" in made.entering(inner=True)[2]


def test_a_claim_holds_while_a_process_is_inside(hierarchies: Path) -> None:
    made = Cgroups("one", hierarchies)
    assert made.claim()
    (hierarchies / "memory" / "one" / "cgroup.procs").write_text("1\n")
    assert not made.claim()
    (hierarchies / "memory" / "one" / "cgroup.procs").write_text("")
    assert made.claim()


def test_version_2_keeps_processes_in_a_leaf(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "cgroup.subtree_control").touch()
    made = Cgroups("one", tmp_path)
    assert made.claim()
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert made.folders == [tmp_path / "one"]
    assert f"{tmp_path}/one/cgroup.procs" in made.entering(inner=False)[2]
    assert f"{tmp_path}/one/init/cgroup.procs" in made.entering(inner=True)[2]
    assert made.mounting()[0] == f"mount -t cgroup2 cgroup2 {tmp_path}"


def test_folders_go_with_all_inside(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    made = Cgroups("one", tmp_path)
    assert made.claim()
    (tmp_path / "memory" / "one" / "kubepods" / "pod").mkdir(parents=True)
    made.remove(SystemClock())
    assert list((tmp_path / "memory").iterdir()) == []


def test_a_command_that_fails_is_named() -> None:
    with pytest.raises(Unavailable, match="`sh -c echo no; exit 3` failed with 3: no"):
        box.run("sh", "-c", "echo no; exit 3")
