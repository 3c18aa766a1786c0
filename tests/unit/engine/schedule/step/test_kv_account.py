"""Positions without a cause: an error in tests, a log line in a worker."""

import pytest

from kvferry.core.causes import ComputeCause
from kvferry.core.errors import InvariantBroken
from kvferry.engine.schedule.step.kv_account import KvAccount


def test_a_position_without_a_cause_is_an_error_in_tests():
    account = KvAccount(num_prompt=10, num_given=10)
    account.plan([(8, ComputeCause.EVICTED)])
    with pytest.raises(InvariantBroken, match="position 8 of a prompt of 10 tokens has no cause"):
        account.computed(0, 10)


def test_a_worker_goes_on_after_a_position_without_a_cause(monkeypatch, caplog):
    monkeypatch.setattr(KvAccount, "is_strict", False)
    account = KvAccount(num_prompt=10, num_given=12)
    account.plan([(8, ComputeCause.EVICTED)])
    assert account.computed(0, 9) == [(ComputeCause.EVICTED, 8), (ComputeCause.FIRST_SEEN, 1)]
    assert account.computed(9, 3) == [(ComputeCause.FIRST_SEEN, 1)]
    assert caplog.text.count("has no cause") == 1
