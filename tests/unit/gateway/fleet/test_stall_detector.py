"""Detection of workers that answer but compute no steps."""

from kvferry.gateway.fleet.stall_detector import StallDetector


def watch_of(*statuses: tuple[str, int, int]) -> StallDetector:
    watch = StallDetector(3)
    for status in statuses:
        watch.observe(*status)
    return watch


def test_running_sequences_without_a_step_are_a_stall() -> None:
    assert not watch_of(("a", 7, 1), ("a", 7, 1), ("a", 7, 2)).is_stalled
    assert watch_of(("a", 7, 1), ("a", 7, 1), ("a", 7, 2), ("a", 7, 2)).is_stalled


def test_a_step_an_idle_status_and_a_new_process_restart_the_detection() -> None:
    stalled = [("a", 7, 1)] * 4
    assert not watch_of(*stalled, ("a", 8, 1)).is_stalled
    assert not watch_of(*stalled, ("a", 7, 0)).is_stalled
    assert not watch_of(*stalled, ("b", 7, 1)).is_stalled


def test_a_worker_that_reports_no_steps_is_never_stalled() -> None:
    assert not watch_of(*[("a", 0, 5)] * 9).is_stalled
