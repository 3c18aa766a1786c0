"""Fairness of the queue: shares by weight, no starvation within a band, virtual time."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.gateway.decide.flow.band_shares import BandShares
from kvferry.gateway.decide.flow.fair_queue import EntryEvent, FairQueue, QueueEntry, StrictOrder

_MAX_COST = 100


@dataclass
class Numbered:
    """A queue whose entries get consecutive numbers."""

    queue: FairQueue
    number: int = 0

    def add(
        self, tenant: str, cost: float = 1, priority: int = 0, weight: float = 1, deadline: float = math.inf
    ) -> QueueEntry:
        self.number += 1
        entry = QueueEntry(tenant, priority, cost, weight=weight, deadline=deadline, number=self.number)
        entry.on(EntryEvent.QUEUE)
        self.queue.add(entry)
        return entry

    def take(self) -> QueueEntry:
        entry = self.queue.next()
        assert entry is not None
        entry.on(EntryEvent.DISPATCH)
        self.queue.begin(entry)
        return entry

    def finish(self, entry: QueueEntry, used: float) -> None:
        entry.on(EntryEvent.END)
        self.queue.end(entry, used)

    def drop(self, entry: QueueEntry) -> None:
        self.queue.remove(entry)
        entry.on(EntryEvent.CANCEL)


@pytest.fixture
def queue() -> Numbered:
    return Numbered(FairQueue(StrictOrder()))


_COSTS = st.lists(st.integers(1, _MAX_COST), min_size=30, max_size=60)


@given(_COSTS, _COSTS, st.sampled_from([0.5, 1.0, 2.0, 5.0]), st.sampled_from([0.5, 1.0, 3.0]))
def test_backlogged_tenants_get_tokens_by_weight_within_one_request(first, second, weight_a, weight_b):
    queue = Numbered(FairQueue(StrictOrder()))
    for cost in first:
        queue.add("a", cost, weight=weight_a)
    for cost in second:
        queue.add("b", cost, weight=weight_b)
    left = {"a": len(first), "b": len(second)}
    served = {"a": 0.0, "b": 0.0}
    bound = max(_MAX_COST / weight_a, _MAX_COST / weight_b)
    while all(left.values()):
        entry = queue.take()
        left[entry.tenant] -= 1
        served[entry.tenant] += entry.cost
        assert abs(served["a"] / weight_a - served["b"] / weight_b) <= bound + 1e-6


@given(st.lists(st.integers(1, _MAX_COST), min_size=10, max_size=40), st.integers(1, 50))
def test_costs_estimated_too_low_are_corrected(costs, factor):
    """Tenant `a` uses more tokens than its estimated cost. Its share of the tokens used stays one half, up to the
    requests whose cost is not known yet.
    """
    queue = Numbered(FairQueue(StrictOrder()))
    for cost in costs:
        queue.add("a", cost)
    for _ in range(20 * len(costs) * factor):
        queue.add("b", 10)
    used = {"a": 0.0, "b": 0.0}
    for _ in range(len(costs)):
        entry = queue.take()
        real = entry.cost * (factor if entry.tenant == "a" else 1)
        used[entry.tenant] += real
        queue.finish(entry, real)
        assert abs(used["a"] - used["b"]) <= _MAX_COST * factor + 10


_MOVES = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "take", "finish", "drop"]),
        st.sampled_from("abc"),
        st.integers(1, _MAX_COST),
        st.sampled_from([-5, 0, 7]),
        st.floats(0, 3 * _MAX_COST),
    ),
    max_size=80,
)


@given(_MOVES)
def test_virtual_time_never_falls_and_no_state_is_left(moves):
    queue = Numbered(FairQueue(StrictOrder()))
    waiting: list[QueueEntry] = []
    running: list[QueueEntry] = []
    times = {-5: 0.0, 0: 0.0, 7: 0.0}
    for move, tenant, cost, priority, used in moves:
        if move == "add":
            waiting.append(queue.add(tenant, cost, priority))
        elif move == "take" and waiting:
            entry = queue.take()
            assert entry.priority == min(other.priority for other in waiting), (
                "a band is empty before the next one is served"
            )
            waiting.remove(entry)
            running.append(entry)
        elif move == "finish" and running:
            queue.finish(running.pop(0), used)
        elif move == "drop" and waiting:
            queue.drop(waiting.pop(0))
        assert len(queue.queue) == len(waiting) == len(list(queue.queue.queued()))
        for band in times:
            busy = any(entry.priority == band for entry in (*waiting, *running))
            now = queue.queue.virtual_time(band)
            assert now >= times[band] if busy else now == 0.0
            times[band] = now
    for entry in running:
        queue.finish(entry, 1)
    while waiting:
        entry = queue.take()
        waiting.remove(entry)
        queue.finish(entry, 1)
    assert (queue.queue.next(), len(queue.queue), queue.queue.num_flows) == (None, 0, 0)


@given(_COSTS, _COSTS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 3]))
def test_backlogged_priorities_share_by_weight_within_one_request(first, second, weight_a, weight_b):
    queue = Numbered(FairQueue(BandShares({0: weight_a, 5: weight_b})))
    for costs, priority in ((first, 0), (second, 5)):
        for cost in costs:
            queue.add("a", cost, priority)
    left, served = {0: len(first), 5: len(second)}, {0: 0.0, 5: 0.0}
    bound = max(_MAX_COST / weight_a, _MAX_COST / weight_b)
    while all(left.values()):
        entry = queue.take()
        left[entry.priority] -= 1
        served[entry.priority] += entry.cost
        assert abs(served[0] / weight_a - served[5] / weight_b) <= bound + 1e-6


def test_a_priority_that_was_idle_earns_no_credit_and_does_not_starve():
    queue = Numbered(FairQueue(BandShares({})))
    running = queue.add("a", 5, priority=0) and queue.take()
    for _ in range(10):
        queue.finish(queue.add("a", 5, priority=0) and queue.take(), 5)
    for _ in range(3):
        queue.add("a", 5, priority=0)
        queue.add("a", 5, priority=9)
    assert [queue.take().priority for _ in range(6)] == [9, 0, 9, 0, 9, 0]
    queue.finish(running, 5)


def test_counters_of_priorities_start_anew_when_no_priority_has_requests():
    """Counters of many priorities, each used once, would otherwise be kept at the same virtual time for ever."""
    shares = BandShares({})
    queue = Numbered(FairQueue(shares))
    for priority in range(50):
        queue.finish(queue.add("a", 5, priority) and queue.take(), 5)
    assert not shares._served


def test_counters_of_idle_priorities_are_dropped_once_the_virtual_time_reaches_them():
    shares = BandShares({})
    queue = Numbered(FairQueue(shares))
    for priority in (0, 1, 1, 1):
        queue.add("a", 5, priority)
    queue.finish(queue.take(), 5)
    assert set(shares._served) == {0, 1}, "the counter of 0 is ahead of the virtual time"
    running = [queue.take() for _ in range(3)]
    for entry in running[:2]:
        queue.finish(entry, 5)
    queue.finish(queue.add("a", 1, 2) and queue.take(), 1)
    assert set(shares._served) == {1, 2}


@given(_MOVES)
def test_shares_of_priorities_leave_no_state_that_has_no_effect(moves):
    shares = BandShares({-5: 4, 0: 2})
    queue = Numbered(FairQueue(shares))
    waiting: list[QueueEntry] = []
    running: list[QueueEntry] = []
    for move, tenant, cost, priority, used in moves:
        if move == "add":
            waiting.append(queue.add(tenant, cost, priority))
        elif move == "take" and waiting:
            entry = queue.take()
            waiting.remove(entry)
            running.append(entry)
        elif move == "finish" and running:
            queue.finish(running.pop(0), used)
        elif move == "drop" and waiting:
            queue.drop(waiting.pop(0))
    for entry in (*running, *waiting):
        if entry in waiting:
            queue.drop(entry)
        else:
            queue.finish(entry, 1)
        idle = {-5, 0, 7} - {entry.priority for entry in (*running, *waiting)}
        if len(idle) == 3:
            assert not shares._served
    assert queue.queue.next() is None
    assert not shares._served


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=60), st.integers(1, 20))
def test_no_tenant_starves_in_a_band(arrivals, cost):
    """A tenant's request leaves before each other tenant has had more than one request."""
    queue = Numbered(FairQueue(StrictOrder()))
    late = queue.add("late", cost)
    for tenant in arrivals:
        queue.add(tenant, _MAX_COST)
    others = 0
    while queue.take() is not late:
        others += 1
    assert others <= len(set(arrivals))


def test_idle_time_earns_no_credit(queue):
    queue.add("a", 10)
    for _ in range(5):
        queue.add("b", 10)
    first = [queue.take().tenant for _ in range(5)]
    assert first == ["a", "b", "b", "b", "b"]
    for _ in range(20):
        queue.add("a", 10)
        queue.add("b", 10)
    assert [queue.take().tenant for _ in range(20)].count("a") in (10, 11), (
        "an idle tenant is not compensated later, so at most 11"
    )


def test_within_a_tenant_the_earliest_deadline_is_first(queue):
    late, none, soon = queue.add("a", deadline=9.0), queue.add("a"), queue.add("a", deadline=5.0)
    assert [queue.take() for _ in range(3)] == [soon, late, none]


def test_equal_deadlines_leave_in_order_of_arrival(queue):
    added = [queue.add("a", deadline=9.0) for _ in range(10)]
    assert [queue.take() for _ in range(10)] == added


def test_the_newest_of_the_last_band_comes_first(queue):
    low, lower = queue.add("a", priority=1), queue.add("b", priority=2)
    lowest = queue.add("a", priority=2)
    queue.add("a", priority=0)
    assert list(queue.queue.newest_below(0)) == [lowest, lower, low]
    assert list(queue.queue.newest_below(0, "a")) == [lowest, low]
    assert list(queue.queue.newest_below(2)) == []


def test_memory_stays_bounded_while_entries_come_and_go(queue):
    """The size of the internal lists is bounded by a constant times the number of queued entries."""
    kept = queue.add("a", priority=-1)
    for _ in range(2000):
        queue.drop(queue.add("b", priority=5, deadline=3.0))
    stays = queue.add("b", priority=5)
    for _ in range(2000):
        queue.drop(queue.add("b", priority=5, deadline=3.0))
    for _ in range(2000):
        entry = queue.add("c", priority=-1)
        entry2 = queue.take()
        queue.finish(entry2, 0.5)
        if entry2 is kept:
            kept = entry
    sizes = [
        len(heap)
        for band in queue.queue._bands.values()
        for heap in (band.ranking, *(flow.order for flow in band.flows.values()))
    ]
    assert max((*sizes, len(queue.queue._order._priorities))) < 200
    assert stays in set(queue.queue.queued())


def test_a_refund_does_not_turn_virtual_time_back(queue):
    expensive = queue.add("a", 100)
    queue.take()
    queue.add("b", 10)
    queue.add("a", 10)
    queue.take()
    queue.take()
    before = queue.queue.virtual_time(0)
    queue.finish(expensive, 0)
    queue.add("a", 10)
    queue.take()
    assert queue.queue.virtual_time(0) >= before > 0
