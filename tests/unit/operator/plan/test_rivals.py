"""A second operator over the same pools is found by the statuses that it writes."""

from typing import Any

from kvferry.operator.plan.process.rivals import Rivals

OWN = "here/kvferry-operator"
NOW = 1_000_000_000.0
"""2001-09-09T01:46:40Z."""


def pool(operator: str, at: str, name: str = "chat") -> dict[str, Any]:
    return {"metadata": {"namespace": "team", "name": name}, "status": {"operator": operator, "observedAt": at}}


def test_own_pools_new_pools_and_old_statuses_indicate_no_rival() -> None:
    rivals = Rivals(OWN, 0.0)
    new = {"metadata": {"namespace": "team", "name": "new"}}
    pools = [pool(OWN, "2001-09-09T01:46:39Z"), new, pool("there/x", "2001-09-09T01:40:00Z", "old")]
    assert rivals.look(pools, 0.0, NOW) == ("", False)
    assert rivals.look([pool("there/x", "never")], 0.0, NOW) == ("", False)


def test_a_rival_is_certain_after_a_write_and_gone_after_a_silence() -> None:
    rivals = Rivals(OWN, 0.0)
    reason, is_certain = rivals.look([pool("there/x", "2001-09-09T01:46:30Z")], 0.0, NOW)
    assert ("the lease there/x" in reason, is_certain) == (True, False)
    reason, is_certain = rivals.look([pool("there/x", "2001-09-09T01:46:30Z")], 60.0, NOW + 60)
    assert (bool(reason), is_certain) == (True, False)
    assert rivals.look([pool("there/x", "2001-09-09T01:46:30Z")], 76.0, NOW + 66) == ("", False)
    reason, is_certain = rivals.look([pool("there/x", "2001-09-09T01:47:30Z")], 60.0, NOW + 60)
    assert (bool(reason), is_certain) == (True, True)
