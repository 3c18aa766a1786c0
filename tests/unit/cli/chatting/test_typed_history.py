"""The history of typed lines is private, bounded, and shared by chats."""

import stat
from pathlib import Path

from kvferry.cli.chatting.typed_history import MAX_LINES, TypedHistory


def test_lines_are_kept_for_the_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "new" / "history"
    TypedHistory(file).add(["a", "b\\", "é 漢"])
    assert TypedHistory(file).lines() == ["a", "b\\", "é 漢"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [one.name for one in file.parent.iterdir()] == ["history"]


def test_two_chats_keep_their_lines_and_the_oldest_are_dropped(tmp_path: Path) -> None:
    one, other = TypedHistory(tmp_path / "history"), TypedHistory(tmp_path / "history")
    one.add(["of one"])
    other.add(["of the other"])
    assert one.lines() == ["of one", "of the other"]
    other.add([str(number) for number in range(3 * MAX_LINES)] + ["x" * 10_000, "\ud800"])
    assert len(one.lines()) == MAX_LINES
    assert len(one.lines()[-2]) == 4096
    assert (tmp_path / "history").stat().st_size < 1 << 16


def test_a_history_that_cannot_be_used_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "history"):
        history = TypedHistory(path)
        assert history.lines() == []
        history.add(["a"])
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file"]


def test_nothing_typed_makes_no_file(tmp_path: Path) -> None:
    TypedHistory(tmp_path / "history").add([])
    assert not (tmp_path / "history").exists()
