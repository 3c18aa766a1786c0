"""A cluster ends with its owner process, and no process, mount or network link is left."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.kube import assets, box, cluster
from harness.kube.assets import Assets
from harness.kube.children import Process, State, is_alive, log_tail
from harness.kube.cluster import NodeOptions

from kvferry.core.clock import SystemClock
from kvferry.core.errors import Unavailable

pytestmark = pytest.mark.cluster

KUBE = [sys.executable, "-m", "harness.kube"]
OWNER = """
import sys
from pathlib import Path
from harness.kube import assets, cluster
from harness.kube.cluster import NodeOptions
node_options = NodeOptions() if sys.argv[2] == "node" else None
made = cluster.up(Path(sys.argv[1]), assets.find(["control", "node"], say=lambda _: None), node_options=node_options)
print("up", flush=True)
sys.stdin.read()
"""


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    clock, pause = SystemClock(), threading.Event()
    deadline = clock.monotonic() + seconds
    while not condition():
        assert clock.monotonic() < deadline, f"the condition was not met within {seconds} s"
        pause.wait(0.05)


def everything(state: State) -> list[Process]:
    inner = [state.box.inner] if state.box is not None and state.box.inner is not None else []
    return [*state.processes.values(), *inner]


def traces(number: int) -> list[str]:
    """Return the remains of a node's sandbox on the machine: its network link, mounts and cgroup folders."""
    one = box.Box(number)
    links = [one.near] if Path("/sys/class/net", one.near).exists() else []
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"/{one.name}" in line]
    return [*links, *mounts, *(str(folder) for folder in one.cgroups.folders if folder.exists())]


def needs_a_node() -> None:
    if reason := box.why_not():
        pytest.skip(reason)


def test_a_cluster_started_by_command_stays_until_it_is_ended_by_command(tmp_path: Path) -> None:
    assets.find(["control"])
    folder = tmp_path / "made"
    said = subprocess.run([*KUBE, "up", folder], capture_output=True, text=True, timeout=120, check=True).stdout
    state = State.read(folder)
    try:
        assert f"export KUBECONFIG={folder}/kubeconfig" in said
        assert all(is_alive(one) for one in everything(state))
        assert cluster.attach(folder, assets.find(["control"])).kubectl("get", "--raw", "/readyz") == "ok"
    finally:
        subprocess.run([*KUBE, "down", folder], timeout=60, check=True)
    assert not any(is_alive(one) for one in everything(state))
    assert not folder.exists()


@pytest.mark.parametrize("kind", ["plain", pytest.param("node", marks=pytest.mark.node)])
def test_a_cluster_started_by_a_test_ends_with_the_test_even_after_a_kill(kind: str, tmp_path: Path) -> None:
    if kind == "node":
        needs_a_node()
    folder = tmp_path / "made"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        state = State.read(folder)
        assert all(is_alive(one) for one in everything(state))
        owner.kill()
    eventually(lambda: not any(is_alive(one) for one in everything(state)))
    cluster.down(folder)
    if state.box is not None:
        assert traces(state.box.number) == []


@pytest.mark.node
@pytest.mark.parametrize("broken", ["kube-apiserver", "kubelet"])
def test_a_start_that_fails_leaves_only_its_logs(broken: str, tmp_path: Path) -> None:
    needs_a_node()
    found = assets.find(["control", "node"])
    programs = tmp_path / "bin"
    programs.mkdir()
    for path in found.folder.iterdir():
        (programs / path.name).symlink_to(path)
    (programs / broken).unlink()
    (programs / broken).write_text("#!/bin/sh\necho out of order\nexit 3\n")
    (programs / broken).chmod(0o755)
    folder = tmp_path / "made"
    with pytest.raises(Unavailable, match=rf"(?s){broken} ended with status 3.*out of order"):
        cluster.up(folder, Assets(programs), node_options=NodeOptions())
    state = State.read(folder)
    assert state.box is not None
    assert not any(is_alive(one) for one in everything(state))
    assert traces(state.box.number) == []
    assert "out of order" in log_tail(folder, broken)


@pytest.mark.node
def test_cgroups_left_by_a_killed_owner_can_be_claimed() -> None:
    needs_a_node()
    one = box.Box(box.MOST_BOXES)
    assert one.cgroups.claim()
    try:
        assert one.cgroups.claim(), "cgroups without processes can be claimed again"
        with (one.cgroups.folders[0] / "cgroup.procs").open("w") as procs:
            sitter = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
            procs.write(str(sitter.pid))
        with sitter:
            assert not one.cgroups.claim()
            sitter.kill()
    finally:
        one.cgroups.remove(SystemClock())
    assert traces(one.number) == []
