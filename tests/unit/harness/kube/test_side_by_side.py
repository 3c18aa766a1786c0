"""Two pytest runs in parallel, reported as one."""

from pathlib import Path

import pytest
from harness.kube.side_by_side import command, note_status, runs_again, status_of


@pytest.mark.parametrize(
    ("statuses", "together"),
    [
        ((0, 0), 0),
        ((0, 5), 0),
        ((5, 0), 0),
        ((5, 5), 5),
        ((0,), 0),
        ((), 5),
        ((1, 0), 1),
        ((0, 1), 1),
        ((5, 2), 2),
        ((1, 5), 1),
    ],
)
def test_no_failure_is_lost_and_a_run_without_tests_is_none(statuses: tuple[int, int], together: int) -> None:
    assert status_of(statuses) == together


def test_runs_do_not_share_their_last_failures() -> None:
    one, two = (command("cluster", cache, ["--last-failed"]) for cache in ("one", "two"))
    assert one != two
    assert one[-1] == "--last-failed"


@pytest.mark.parametrize(("status", "again"), [(0, False), (5, False), (1, True), (2, True), (4, True)])
def test_only_failed_runs_are_repeated(status: int, again: bool, tmp_path: Path) -> None:
    assert runs_again("node", ["--last-failed"], tmp_path), "without a recorded status every run begins"
    note_status("node", status, tmp_path)
    assert runs_again("node", ["--last-failed"], tmp_path) is again
    assert runs_again("node", ["-x"], tmp_path), "without --last-failed every run begins"
