"""When a pool is due again: never at once because of something that nobody waits for."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.operator.pools import pool

from kvferry.operator.reconcile import Reconciler


def again(keys_until: float, **fields: Any) -> float | None:
    memory = SimpleNamespace(keys_until=keys_until, settled_at=None)
    facts = SimpleNamespace(report=None)
    plain = {"memory": memory, "facts": facts, "pool": pool(), "now": 100.0, "refused": None, "contested": None}
    return Reconciler._again(None, SimpleNamespace(**{**plain, **fields}), "")


@pytest.mark.parametrize(
    ("keys_until", "seconds"), [(float("-inf"), 600.0), (99.0, 600.0), (105.0, 5.0), (690.0, 590.0)]
)
def test_a_pool_with_keys_of_its_own_is_not_due_all_the_time(keys_until, seconds):
    assert again(keys_until) == seconds
