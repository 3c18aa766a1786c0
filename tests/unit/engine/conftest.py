"""Fixtures of the engine's tests."""

import pytest

from kvferry.engine.schedule.step.kv_account import KvAccount


@pytest.fixture(autouse=True)
def _strict_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a computed token without a cause an error."""
    monkeypatch.setattr(KvAccount, "is_strict", True)
