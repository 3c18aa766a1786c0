"""The queue of a full pool: priorities, shedding, fairness, bounds."""

from kvferry.gateway.decide.flow.fair_queue import EntryState, QueueEntry
from kvferry.picker.decide.exchange import Refusal
from kvferry.picker.decide.saturation import SaturationConfig, SaturationQueue

OBJECTIVES = {"high": 10, "low": 1, "batch": -1}


def queue(**changes: object) -> SaturationQueue:
    return SaturationQueue(SaturationConfig(objectives=OBJECTIVES, **changes))  # type: ignore[arg-type]


def waiting(of: SaturationQueue, objective: str = "", fairness: str = "") -> QueueEntry:
    entry = of.enter(objective, fairness, 100, is_saturated=True)
    assert isinstance(entry, QueueEntry)
    return entry


def test_a_pool_with_room_lets_all_pass() -> None:
    assert queue().enter("batch", "", 1, is_saturated=False) is None


def test_negative_priorities_are_shed_with_a_time_to_retry() -> None:
    refused = queue().enter("batch", "", 1, is_saturated=True)
    assert isinstance(refused, Refusal)
    assert (refused.status, refused.reason) == (429, "shed")
    assert refused.retry_after_seconds


def test_higher_priorities_go_first_then_the_order_of_arrival() -> None:
    waits = queue()
    entries = [waiting(waits, objective) for objective in ("", "low", "unknown", "high", "low")]
    order = [waits.release() for _ in entries]
    assert order == [entries[3], entries[1], entries[4], entries[0], entries[2]]
    assert waits.release() is None
    for entry in entries:
        waits.end(entry)
        waits.end(entry)


def test_fairness_ids_share() -> None:
    waits = queue()
    heavy = [waiting(waits, fairness="heavy") for _ in range(6)]
    light = [waiting(waits, fairness="light") for _ in range(2)]
    first = [waits.release() for _ in range(4)]
    assert sum(entry in light for entry in first) == 2
    assert sum(entry in heavy for entry in first) == 2


def test_those_who_come_later_do_not_overtake() -> None:
    waits = queue()
    waiting(waits)
    assert isinstance(waits.enter("", "", 1, is_saturated=False), QueueEntry)


def test_a_full_queue_refuses_the_newest_of_the_lowest_priority() -> None:
    waits = queue(max_queued=2)
    first, second = waiting(waits), waiting(waits)
    refused = waits.enter("", "", 1, is_saturated=True)
    assert isinstance(refused, Refusal)
    assert refused.reason == "queue_full"
    third = waiting(waits, "high")
    assert (first.state, second.state, third.state) == (EntryState.QUEUED, EntryState.REFUSED, EntryState.QUEUED)
    assert len(waits) == 2


def test_a_wait_that_is_over_leaves_the_queue() -> None:
    waits = queue()
    entry = waiting(waits)
    waits.end(entry)
    assert (len(waits), entry.state, waits.release()) == (0, EntryState.EXPIRED, None)


def test_without_a_wait_nothing_is_queued() -> None:
    assert queue(queue_seconds=0.0).enter("", "", 1, is_saturated=True) is None
