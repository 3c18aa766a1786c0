"""The ledger: rows of tenants and adapters sum to what workers report, in bounded memory."""

import csv
import io

from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.causes import ComputeCause, ComputedTokens
from kvferry.gateway.decide.lifecycle.ledger import COLUMNS, Ledger, LedgerRow, count_answer, count_computed
from kvferry.gateway.http.ledger_route import as_csv

KINDS = ("computed_tokens", "cached_tokens", "loaded_tokens", "handed_off_tokens")


ANSWERS = st.tuples(
    st.sampled_from("abcd"),
    st.sampled_from(["", "x", "y"]),
    st.booleans(),
    st.integers(1, 99),
    st.integers(0, 99),
    st.integers(0, 99),
    st.integers(0, 9),
)
"""Tenant, adapter, whether it is the first answer, and numbers of tokens: prompt, cached, loaded, computed again."""


@given(st.integers(1, 5), st.lists(ANSWERS))
def test_rows_sum_to_the_prompts(max_rows: int, answers: list[tuple[str, str, bool, int, int, int, int]]) -> None:
    ledger, expected, again = Ledger(max_rows), 0, 0
    for tenant, adapter, is_first, num_prompt, cached, loaded, preempted in answers:
        row = ledger.row(tenant, adapter)
        count_answer(row, num_prompt, cached, loaded, is_first=is_first)
        rest = max(0, num_prompt - cached - loaded)
        count_computed(
            row,
            (ComputedTokens(ComputeCause.FIRST_SEEN, rest), ComputedTokens(ComputeCause.PREEMPTED, preempted)),
        )
        expected += num_prompt
        again += preempted
    rows = ledger.rows()
    assert sum(getattr(row, kind) for row in rows for kind in KINDS) == expected
    assert sum(row.computed_again_tokens for row in rows) == again
    assert len(rows) <= max_rows + 1
    named = [(row.tenant, row.adapter) for row in rows if not row.is_others]
    assert len(named) == len(set(named))


def test_further_tenants_share_a_row() -> None:
    ledger = Ledger(2)
    for number in range(5):
        ledger.row(f"t{number}", "").output_tokens += 1
    assert [(row.tenant, row.is_others, row.output_tokens) for row in ledger.rows()] == [
        ("t0", False, 1), ("t1", False, 1), ("", True, 3),
    ]  # fmt: skip
    assert ledger.row("t0", "").output_tokens == 1, "a row stays that of its tenant"


def test_names_in_csv_stay_names() -> None:
    names = ["=1+1", "a,b", 'say "x"', "two\nlines", "plain"]
    text = as_csv([LedgerRow(name, "@x", cached_tokens=7) for name in names])
    head, *rows = csv.reader(io.StringIO(text))
    assert tuple(head) == COLUMNS
    assert [row[0] for row in rows] == ["'=1+1", *names[1:]]
    assert {row[1] for row in rows} == {"'@x"}
    assert {row[head.index("cached_tokens")] for row in rows} == {"7"}
