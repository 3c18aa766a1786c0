"""The table of causes, and the page that explains them."""

import re
from pathlib import Path

from kvferry.core.causes import AGAIN, CAUSE_HELP, ComputeCause

PAGE = Path(__file__).resolve().parents[3] / "docs/computed-tokens.md"


def test_each_cause_has_a_description() -> None:
    assert set(CAUSE_HELP) == set(ComputeCause)
    assert set(ComputeCause) >= AGAIN


def test_the_page_explains_each_cause_once_and_in_order() -> None:
    table = PAGE.read_text().partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(ComputeCause)
