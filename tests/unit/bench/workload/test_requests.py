"""Requests of each workload: lengths, shared prefixes, conversations, and equality by seed."""

import itertools

import pytest

from kvferry.bench.workload.arrivals import Arrivals
from kvferry.bench.workload.requests import (
    FIRST_TOKEN,
    NUM_TOKENS,
    WORKLOADS,
    BenchRequest,
    Workload,
    clipped,
    in_vocabulary,
)
from kvferry.core.errors import UsageError

STEADY = Arrivals("constant", 10.0)


@pytest.mark.parametrize("kind", WORKLOADS)
def test_a_seed_makes_the_same_requests_in_order_of_arrival(kind: str) -> None:
    workload = Workload(kind, 40, 10, 0.5, num_prefix=20)
    first, again, other = (workload.requests(50, STEADY, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(first) == 50
    assert [r.at for r in first] == sorted(r.at for r in first)
    assert all(FIRST_TOKEN <= token < FIRST_TOKEN + NUM_TOKENS for r in first for token in r.prompt)


def test_lengths_are_exact_without_a_spread_and_within_it_otherwise() -> None:
    exact = Workload(num_input=40, num_output=10).requests(20, STEADY, 0)
    assert {(len(r.prompt), r.num_output) for r in exact} == {(40, 10)}
    spread = Workload(num_input=40, num_output=10, spread=0.5).requests(300, STEADY, 0)
    assert {len(r.prompt) for r in spread} <= set(range(20, 61))
    assert len({len(r.prompt) for r in spread}) > 20
    assert 1 in {r.num_output for r in Workload(num_output=1, spread=0.9).requests(9, STEADY, 0)}


def test_prompts_with_shared_prefixes_begin_with_one_of_them() -> None:
    requests = Workload("shared-prefix", 8, 4, num_prefix=32, num_prefixes=3).requests(60, STEADY, 5)
    assert len({r.prompt[:32] for r in requests}) == 3
    assert len({r.prompt for r in requests}) == 60
    assert {len(r.prompt) for r in requests} == {40}


def test_each_turn_begins_with_the_turn_before_and_room_for_its_answer() -> None:
    requests = Workload("multi-turn", 8, 4, num_turns=3, turn_seconds=2.0).requests(12, STEADY, 5)
    for _, turns in itertools.groupby(sorted(requests, key=lambda r: (r.session or 0, r.at)), lambda r: r.session):
        one, two, three = turns
        assert [len(r.prompt) for r in (one, two, three)] == [8, 20, 32]
        assert two.prompt[:8] == one.prompt
        assert three.prompt[:20] == two.prompt
        assert (two.at - one.at, three.at - two.at) == pytest.approx((2.0, 2.0))


def test_requests_are_cut_to_the_limits_of_a_server() -> None:
    requests = [BenchRequest(0.0, (1, 2, 3), 5), BenchRequest(1.0, (1,), 2)]
    made, count = clipped(requests, max_input=2, max_output=4)
    assert made == [BenchRequest(0.0, (1, 2), 4), BenchRequest(1.0, (1,), 2)]
    assert count == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kind": "poem"}, "workload"),
        ({"num_input": 0}, "num_input"),
        ({"num_output": (1 << 20) + 1}, "num_output"),
        ({"num_prefixes": 0}, "num_prefixes"),
        ({"num_turns": 0}, "num_turns"),
        ({"spread": 1.0}, "spread"),
        ({"spread": -0.1}, "spread"),
        ({"turn_seconds": -1.0}, "turn_seconds"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(changes: dict[str, object], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        Workload(**changes)  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("count", [0, 1_000_001])
def test_the_number_of_requests_is_bounded(count: int) -> None:
    with pytest.raises(UsageError, match="requests must be between 1 and"):
        Workload().requests(count, STEADY, 0)


def test_a_small_vocabulary_keeps_equal_prefixes_equal() -> None:
    requests = Workload("shared-prefix", 10, 4, num_prefix=8, num_prefixes=1).requests(3, STEADY, 1)
    small = in_vocabulary(requests, 256)
    assert all(0 <= token < 256 for r in small for token in r.prompt)
    assert len({r.prompt[:8] for r in small}) == 1
    assert len({r.prompt for r in small}) == 3
    assert in_vocabulary(requests, FIRST_TOKEN + NUM_TOKENS) == requests
    with pytest.raises(UsageError, match="vocabulary must be at least 1, not 0"):
        in_vocabulary(requests, 0)
