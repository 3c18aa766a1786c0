"""Loads of endpoints: what pages report, what this picker sent, and pages that are old, frozen, wrong or gone."""

import math

import pytest

from kvferry.core.clock import ManualClock
from kvferry.picker.decide.endpoints import FROZEN_SECONDS, EndpointStates, PoolEndpoint, Trust
from kvferry.picker.decide.engine_metrics import EngineLoad, SumCount

A, B, C = (f"10.0.0.{number}:8000" for number in range(3))


def endpoint(address: str, name: str = "", **fields: bool) -> PoolEndpoint:
    return PoolEndpoint(address, name or address, address, **fields)


class Pool:
    """Endpoints with a clock; each page differs unless it is frozen."""

    def __init__(self, *addresses: str) -> None:
        self.clock = ManualClock()
        self.states = EndpointStates(self.clock, scrape_seconds=0.2, stale_seconds=10.0)
        self.states.follow(map(endpoint, addresses))
        self.pages = 0

    def page(self, address: str, running: int = 0, waiting: int = 0, *, frozen: bool = False, **fields: float) -> None:
        self.pages += 1
        load = EngineLoad("vllm", running, waiting, **fields)  # type: ignore[arg-type]
        digest = b"same" if frozen else str(self.pages).encode()
        self.states.scraped(address, load, digest, self.clock.monotonic())

    def load(self, address: str) -> int:
        state = self.states.by_address[address]
        return self.states.load_of(state, self.states.trust(state))

    def trust(self, address: str) -> Trust:
        return self.states.trust(self.states.by_address[address])


def test_a_request_counts_from_the_choice_to_its_end() -> None:
    pool = Pool(A, B)
    pool.page(A, running=2)
    pool.clock.advance(0.1)
    sent = pool.states.send(A, "", 100, 0)
    assert (pool.load(A), pool.states.num_open) == (3, 1)
    pool.states.answered(sent)
    assert pool.states.commitments.count == 0
    pool.states.ended(sent)
    pool.states.ended(sent)
    assert (pool.load(A), pool.states.num_open) == (2, 0)


def test_a_page_that_includes_a_request_does_not_count_it_twice() -> None:
    pool = Pool(A)
    pool.page(A)
    pool.clock.advance(0.1)
    pool.states.send(A, "", 100, 0)
    pool.clock.advance(0.1)
    pool.page(A, running=1)
    assert pool.load(A) == 1


def test_a_request_whose_end_is_not_seen_counts_until_the_next_page() -> None:
    pool = Pool(A)
    pool.page(A)
    pool.clock.advance(0.1)
    sent = pool.states.send(A, "", 100, 0)
    pool.states.ended(sent, is_known=False)
    assert (pool.load(A), pool.states.num_open) == (1, 0)
    pool.clock.advance(0.1)
    pool.page(A)
    assert pool.load(A) == 0


def test_without_pages_the_unseen_ends_are_forgotten() -> None:
    pool = Pool(A)
    sent = pool.states.send(A, "", 100, 0)
    pool.states.ended(sent, is_known=False)
    assert pool.load(A) == 1
    pool.clock.advance(60)
    pool.states.failed(A, "refused")
    assert pool.load(A) == 0


def test_an_endpoint_that_claims_to_be_idle_gets_no_more_than_its_own_requests_show() -> None:
    pool = Pool(A)
    for _ in range(7):
        pool.states.send(A, "", 100, 0)
    pool.clock.advance(0.1)
    pool.page(A, running=0, waiting=0)
    assert pool.load(A) == 7


def test_trust_falls_with_age_and_the_load_of_a_stale_page_is_at_least_the_mean() -> None:
    pool = Pool(A, B)
    pool.page(A, running=0)
    pool.page(B, running=10)
    assert (pool.trust(A), pool.load(A)) == (Trust.FRESH, 0)
    pool.clock.advance(2.0)
    pool.page(B, running=10)
    assert (pool.trust(A), pool.load(A)) == (Trust.STALE, 5)
    pool.clock.advance(9.0)
    assert pool.trust(A) is Trust.LOST


def test_an_endpoint_that_never_reported_is_lost() -> None:
    pool = Pool(A)
    assert pool.trust(A) is Trust.LOST
    pool.states.scraped(A, None, b"", 0.0)
    assert pool.trust(A) is Trust.LOST
    assert "no metrics" in pool.states.by_address[A].failure


def test_a_busy_page_that_never_changes_is_frozen_and_an_idle_one_is_not() -> None:
    pool = Pool(A, B)
    for _ in range(math.ceil(FROZEN_SECONDS / 0.2) + 2):
        pool.page(A, running=3, frozen=True)
        pool.page(B, running=0, frozen=True)
        pool.clock.advance(0.2)
    pool.page(A, running=3, frozen=True)
    pool.page(B, running=0, frozen=True)
    assert (pool.trust(A), pool.trust(B)) == (Trust.STALE, Trust.FRESH)


def test_a_counter_that_goes_back_is_a_restart_and_empties_the_cache() -> None:
    pool = Pool(A)
    pool.page(A, prompt_tokens=100.0)
    pool.states.history.sent(A, [1, 2, 3])
    pool.page(A, prompt_tokens=150.0)
    assert pool.states.history.cached([1, 2]) == {A: 2}
    pool.page(A, prompt_tokens=10.0)
    assert pool.states.history.cached([1, 2]) == {}


def test_another_pod_at_the_same_address_has_nothing_of_the_first() -> None:
    pool = Pool()
    pool.states.follow([endpoint(A, "pod-1")])
    pool.page(A, running=5)
    pool.states.history.sent(A, [1])
    sent = pool.states.send(A, "", 100, 0)
    pool.states.follow([endpoint(A, "pod-2")])
    assert pool.trust(A) is Trust.LOST
    assert (pool.load(A), pool.states.history.cached([1])) == (0, {})
    pool.states.ended(sent)
    assert pool.states.commitments.count == 0


def test_removed_endpoints_leave_nothing() -> None:
    pool = Pool(A, B)
    pool.page(A, running=8)
    sent = pool.states.send(A, B, 100, 0)
    pool.states.history.sent(A, [1])
    pool.states.follow([endpoint(B)])
    assert pool.states.num_open == 0
    pool.page(A, running=8)  # a scrape that was in flight
    assert A not in pool.states.by_address
    pool.states.ended(sent)
    assert pool.states.commitments.count == 0


def test_a_prefill_endpoint_is_free_when_the_response_begins() -> None:
    pool = Pool(A, B)
    sent = pool.states.send(A, B, 100, 0)
    assert (pool.load(A), pool.load(B)) == (1, 1)
    pool.states.answered(sent)
    assert (pool.load(A), pool.load(B)) == (1, 0)
    pool.states.ended(sent)
    assert pool.states.num_open == 0


def test_durations_are_learned_from_the_pages() -> None:
    pool = Pool(A)
    for number in range(8):
        load = EngineLoad(
            "vllm",
            running=1,
            prompt_tokens=1000.0 * number,
            cached_tokens=0.0,
            prefill=SumCount(0.1 * number, number),
            steps=SumCount(0.3 * number, 30 * number),
            output=SumCount(64.0 * number, number),
        )
        pool.states.scraped(A, load, str(number).encode(), float(number))
    name = pool.states.by_address[A].listed.name
    constant, slope = pool.states.estimates.prefill_line(name)  # type: ignore[arg-type]
    assert constant + slope * 1000 == pytest.approx(0.1, rel=0.01)
    constant, slope = pool.states.estimates.step_line(name)  # type: ignore[arg-type]
    assert constant + slope == pytest.approx(0.01, rel=0.01)
    assert pool.states.estimates.output_tokens(0) == pytest.approx(64.0, rel=0.01)


def test_a_replica_has_the_memory_of_the_page() -> None:
    pool = Pool(A)
    pool.page(A, running=1, usage=0.25, num_blocks=1000, block_tokens=32)
    replica = pool.states.replica(pool.states.by_address[A], Trust.FRESH)
    assert (replica.blocks_total, replica.blocks_free, replica.block_tokens, replica.load) == (1000, 750, 32, 1)
