"""Processes of a cluster: started, recorded and ended."""

import os
import signal
from pathlib import Path

import msgspec
import pytest
from harness.kube.children import BoxState, Children, Process, State, is_alive, kill, log_tail, start_of

from kvferry.core.clock import SystemClock
from kvferry.core.errors import Unavailable, UsageError


@pytest.fixture
def children(tmp_path: Path) -> Children:
    (tmp_path / "log").mkdir()
    return Children(tmp_path, State(), SystemClock())


def test_a_process_is_recorded_in_the_state_file(children: Children) -> None:
    made = children.spawn("sleeper", ["sleep", "600"])
    try:
        assert State.read(children.folder).processes == {"sleeper": made}
        assert is_alive(made)
        children.check("sleeper")
    finally:
        children.end_all()
    assert not is_alive(made)
    with pytest.raises(Unavailable, match="sleeper ended with status -9"):
        children.check("sleeper")


def test_the_error_for_an_ended_process_has_the_end_of_its_log(children: Children) -> None:
    made = children.spawn("talker", ["sh", "-c", "for i in $(seq 50); do echo line $i; done; exit 4"])
    children._ours["talker"].wait(10)
    assert not is_alive(made)
    with pytest.raises(Unavailable, match=r"talker ended with status 4:\nline 21\n(.*\n)*line 50$"):
        children.check("talker")
    children.end_all()


def test_a_process_with_a_reused_pid_is_not_killed() -> None:
    own = start_of(os.getpid())
    assert own is not None
    assert is_alive(Process(os.getpid(), own))
    earlier = Process(os.getpid(), own - 1)
    assert not is_alive(earlier)
    kill(earlier)  # a kill would end this test


def test_processes_of_another_harness_process_can_be_ended(children: Children) -> None:
    made = children.spawn("sleeper", ["sleep", "600"])
    attached = Children(children.folder, State.read(children.folder), SystemClock(), lasting=True)
    os.kill(made.pid, signal.SIGSTOP)  # a stopped process can be killed too
    attached.end_all()
    assert not is_alive(made)
    children.end_all()


def test_a_state_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = State({"etcd": Process(7, 8)}, {"box": 0.5}, "https://there", BoxState(3, Process(9, 10)))
    state.write(tmp_path)
    assert State.read(tmp_path) == state
    assert sorted(os.listdir(tmp_path)) == ["state.json"]


def test_a_folder_without_a_cluster_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no cluster in .* \(it has no state.json\)"):
        State.read(tmp_path)
    (tmp_path / "state.json").write_bytes(msgspec.json.encode({"processes": 3}))
    with pytest.raises(UsageError, match=r"is not a cluster.s state file"):
        State.read(tmp_path)
    assert log_tail(tmp_path, "none").startswith("(no log")
