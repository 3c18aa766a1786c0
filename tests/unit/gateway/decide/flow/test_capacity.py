"""The fleet's room for sequences, computed from the workers' reports."""

import pytest

from kvferry.gateway.decide.flow.capacity import PREFILL_TOKENS_PER_WORKER, UNBOUNDED, Room, WorkerRoom, room


def worker(role: str = "both", most: int = 8, running: int = 0, own: int = 0, usage: float = 0.0) -> WorkerRoom:
    return WorkerRoom(role, most, running, own, usage)


def test_workers_that_generate_set_the_bound():
    found = room([worker("prefill", 64), worker("decode", 8), worker("decode", 4)], max_streams=100)
    assert found == Room(12, 64, True, PREFILL_TOKENS_PER_WORKER, 100)


def test_aggregated_workers_count_only_without_a_pair():
    both = [worker("both", 5), worker("both", 5)]
    assert room(both, 100) == Room(10, 5, False, 2 * PREFILL_TOKENS_PER_WORKER, 100)
    assert room([*both, worker("prefill", 64), worker("decode", 8)], 100).sequences == 8
    assert room([*both, worker("decode", 8)], 100).sequences == 10


def test_sequences_of_other_gateways_take_room():
    assert worker(most=8, running=6, own=2).sequences == 4
    assert worker(most=8, running=2, own=2).sequences == 8
    assert worker(most=8, running=20, own=0).sequences == 0


@pytest.mark.parametrize(("usage", "expected"), [(0.94, 8), (0.95, 3), (1.0, 3)])
def test_a_worker_whose_blocks_are_in_use_gets_no_more(usage, expected):
    assert worker(most=8, running=3, own=3, usage=usage).sequences == expected


def test_blocks_without_sequences_do_not_close_a_worker():
    """Leases free the pages of offers. If they closed a worker without sequences, it could stay closed for ever."""
    assert worker(usage=1.0).sequences == 8


def test_workers_that_report_no_bound_have_none():
    assert room([worker(most=0), worker(most=0)], 100).sequences == UNBOUNDED


def test_a_full_prefill_stage_closes_the_fleet():
    workers = [worker("prefill", 4, running=4), worker("decode", 8)]
    assert room(workers, 100).sequences == 0


@pytest.mark.parametrize(("role", "expected"), [("prefill", 8), ("decode", 8)])
def test_half_a_fleet_has_its_own_room(role, expected):
    found = room([worker(role)], 100)
    assert (found.sequences, found.searches, found.is_split) == (expected, expected // 2, False)


def test_without_workers_requests_pass_and_fail():
    assert room([], 7) == Room(streams=7)
