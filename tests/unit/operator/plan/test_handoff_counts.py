"""Hand-offs of the last minutes, computed from the reports of gateways that answer in turn."""

from kvferry.operator.plan.process.handoff_counts import WINDOW_SECONDS, RecentHandoffs


def test_two_gateways_that_answer_in_turn_are_not_compared_with_each_other() -> None:
    recent = RecentHandoffs()
    assert recent.take("a", 0, {"fetched": 100, "failed": 0}) == {"fetched": 0, "failed": 0}
    assert recent.take("b", 2, {"fetched": 7, "failed": 50}) == {"fetched": 0, "failed": 0}
    assert recent.take("a", 4, {"fetched": 104, "failed": 0}) == {"fetched": 4, "failed": 0}
    assert recent.take("b", 6, {"fetched": 8, "failed": 51}) == {"fetched": 5, "failed": 1}


def test_only_the_last_minutes_count() -> None:
    recent = RecentHandoffs()
    recent.take("a", 0, {"fetched": 0})
    recent.take("a", 1, {"fetched": 10})
    assert recent.take("a", 2, {"fetched": 11}) == {"fetched": 11}
    assert recent.take("a", WINDOW_SECONDS + 1.5, {"fetched": 15}) == {"fetched": 5}


def test_a_gateway_that_is_gone_is_forgotten() -> None:
    recent = RecentHandoffs()
    recent.take("a", 0, {"failed": 0})
    recent.take("a", 1, {"failed": 9})
    assert recent.take("b", 2, {}) == {"failed": 9}
    assert recent.take("b", WINDOW_SECONDS + 2, {}) == {}


def test_a_gateway_without_an_identity_counts_as_another_one_when_its_counters_fall() -> None:
    recent = RecentHandoffs()
    recent.take("", 0, {"fetched": 5})
    recent.take("", 1, {"fetched": 9})
    assert recent.take("", 2, {"fetched": 1}) == {"fetched": 0}
