"""Two runs of tests as one."""

from pathlib import Path

import pytest

from kvferry.testing.kube.side_by_side import command, runs_again, status_of


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


def test_runs_do_not_share_what_failed_last() -> None:
    one, two = (command("cluster", cache, ["--last-failed"]) for cache in ("one", "two"))
    assert one != two
    assert one[-1] == "--last-failed"
    assert "--last-failed-no-failures=none" in one


def test_only_what_failed_begins_again(tmp_path: Path) -> None:
    failed = tmp_path / ".pytest_cache" / "node" / "v" / "cache" / "lastfailed"
    failed.parent.mkdir(parents=True)
    failed.write_text('{"tests/cluster/test_node.py::test": true}')
    assert [runs_again(cache, ["--last-failed"], tmp_path) for cache in ("node", "cluster")] == [True, False]
    assert runs_again("cluster", ["-x"], tmp_path), "without the option every run begins"
