"""The recorded results are those of the table, and the quick rows are computed again."""

import pytest
from harness.results.__main__ import PAGE, chosen, recorded
from harness.results.page import page
from harness.results.rows import Row
from harness.results.table import ROWS

FAST = [row for row in ROWS if row.is_fast]


def test_every_row_of_the_table_is_recorded() -> None:
    found = recorded()
    assert sorted(found) == [row.number for row in ROWS]
    for row in ROWS:
        kept = found[row.number]
        assert (kept["id"], kept["claim"], kept["original"], kept["pass_line"]) == (
            row.source, row.claim, row.original, row.pass_line,
        )  # fmt: skip
        assert kept["command"] == row.command


def test_a_missed_target_has_a_reason() -> None:
    assert all(row["why"] for row in recorded().values() if not row["passed"])


def test_the_page_shows_the_record() -> None:
    assert page([recorded()[row.number] for row in ROWS]) == PAGE.read_text("utf-8")


def test_every_picture_is_there() -> None:
    pictures = [str(row["picture"]) for row in recorded().values() if row["picture"]]
    assert pictures
    for name in pictures:
        assert (PAGE.parent / name).read_text("utf-8").startswith("<svg")
        assert f"]({name})" in PAGE.read_text("utf-8")


@pytest.mark.parametrize("row", FAST, ids=lambda row: f"H{row.number}")
def test_fast_rows_give_the_recorded_outcome_again(row: Row) -> None:
    outcome, kept = row.run(), recorded()[row.number]
    assert (outcome.ours, outcome.passed) == (kept["ours"], kept["passed"])


def test_rows_are_chosen_by_number_or_source() -> None:
    assert [row.number for row in chosen(["H4"])] == [4]
    assert [row.number for row in chosen([ROWS[0].source, "H4"])] == [1, 4]
    assert chosen([]) == list(ROWS)
    with pytest.raises(SystemExit, match="the rows are H1"):
        chosen(["H99"])
