"""docs/faults.md is the output of a run over exactly the existing cases."""

from collections import Counter

from harness.faults import page
from harness.faults.cases import CASES, GROUPS, Case
from harness.faults.trial import Row


def test_the_page_has_the_cases_of_the_code() -> None:
    """After a change of the cases, `make faults`, run as root, updates the page."""
    assert page.promised(page.PAGE.read_text("utf-8")) == [(c.group, c.fault, c.expected) for c in CASES]


def test_cases_have_names_of_their_own_and_known_stacks() -> None:
    assert max(Counter(case.name for case in CASES).values()) == 1
    assert [group for group in GROUPS if any(case.group == group for case in CASES)] == list(GROUPS)
    assert {case.group for case in CASES} == set(GROUPS)


def test_a_page_contains_the_measurements() -> None:
    rows = {case.name: _row(case) for case in CASES}
    text = page.render(page.Results("a machine", "abc", rows))
    assert page.promised(text) == [(c.group, c.fault, c.expected) for c in CASES]
    assert "| 7 | 1 | 2.5 | 3.0 | 0.0 | 4 tickets |" in text
    assert "on a machine" in text
    assert text.count("\na note\n") == len(CASES)


def _row(case: Case) -> Row:
    return Row(case.name, 7, 1, 2.5, 3.0, 0.0, {"tickets": 4}, "a note")
