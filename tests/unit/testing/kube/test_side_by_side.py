"""Two runs of tests as one."""

import pytest

from kvferry.testing.kube.side_by_side import command, status_of


@pytest.mark.parametrize(
    ("statuses", "together"),
    [((0, 0), 0), ((0, 5), 0), ((5, 0), 0), ((5, 5), 5), ((1, 0), 1), ((0, 1), 1), ((5, 2), 2), ((1, 5), 1)],
)
def test_no_failure_is_lost_and_a_run_without_tests_is_none(statuses: tuple[int, int], together: int) -> None:
    assert status_of(statuses) == together


def test_runs_do_not_share_what_failed_last() -> None:
    one, two = (command("cluster", cache, ["--last-failed"]) for cache in ("one", "two"))
    assert one != two
    assert one[-1] == "--last-failed"
    assert "--last-failed-no-failures=none" in one
