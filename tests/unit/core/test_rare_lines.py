"""Rare lines: one of each kind per interval, and how many were left out."""

from kvferry.core.clock import ManualClock
from kvferry.core.rare_lines import RareLines, more


def test_a_kind_has_one_line_per_interval() -> None:
    clock = ManualClock()
    lines = RareLines(clock, 60.0)
    assert [lines.left_out("a") for _ in range(4)] == [0, None, None, None]
    assert lines.left_out("b") == 0
    clock.advance(59.9)
    assert lines.left_out("a") is None
    clock.advance(0.2)
    assert [lines.left_out("a"), lines.left_out("a")] == [4, None]
    clock.advance(1000)
    assert lines.left_out("a") == 1
    assert (more(0), more(3)) == ("", "; 3 more since the last line")


def test_kinds_are_bounded() -> None:
    lines = RareLines(ManualClock())
    for number in range(65):
        assert lines.left_out(str(number)) == 0
    assert lines.left_out("0") == 0, "forgotten"
    assert lines.left_out("64") is None
