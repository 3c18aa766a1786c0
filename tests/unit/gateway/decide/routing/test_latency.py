"""Routing by estimated latency: each term decides if the others are equal."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.clock import ManualClock
from kvferry.core.ids import WorkerId
from kvferry.gateway.decide.cache_map.cache_map import Basis
from kvferry.gateway.decide.cache_map.map_states import MapState
from kvferry.gateway.decide.estimates.estimates import Commitment, Commitments, Estimates, Process
from kvferry.gateway.decide.routing.latency import LatencyPolicy
from kvferry.gateway.decide.routing.routes import (
    Candidates,
    Place,
    PredictedPrefix,
    Replica,
    RouteReason,
    RouteRequest,
    Work,
    choose,
)

PER_TOKEN, STEP, PER_SEQUENCE = 1e-3, 0.01, 0.001


def replica(name: str, load: int = 0, **fields) -> Replica:
    return Replica(f"{name}:1", WorkerId(name), b"f", load, blocks_total=1000, blocks_free=1000, **fields)


def estimates_of(*names: str) -> Estimates:
    """Return estimates: 1 ms per prompt token, 10 ms plus 1 ms per sequence for a step, 10 us per token transferred."""
    estimates = Estimates()
    for name in names:
        process = Process(WorkerId(name), "1")
        for number in range(1, 40):
            estimates.observe_prefill(process, 50 * number, PER_TOKEN * 50 * number)
            estimates.observe_output(process, number, 10, 10 * (STEP + PER_SEQUENCE * number))
        for other in names:
            for number in range(1, 5):
                estimates.observe_transfer(
                    process, Process(WorkerId(other), "1"), "unknown", 100 * number, 1e-5 * 100 * number
                )
    for _ in range(500):
        estimates.observe_length(20)
    return estimates


def cached(**tokens: int):
    def of(one: Replica) -> PredictedPrefix:
        count = tokens.get(one.worker_id, 0)
        return PredictedPrefix(count, count, count > 0, MapState.EXACT, Basis.EXACT)

    return of


def route_request(tokens: int = 1000, key: bytes = b"k", **hits: int) -> RouteRequest:
    return RouteRequest(lambda _: key, cached(**hits), tokens, 64)


def policy(*names: str, commitments: Commitments | None = None, estimates: Estimates | None = None) -> LatencyPolicy:
    return LatencyPolicy(estimates or estimates_of(*names), commitments or Commitments(ManualClock()))


def test_a_cached_prefix_decides_until_the_queue_takes_longer_than_computing_it():
    a, b = replica("a"), replica("b")
    chosen = policy("a", "b").one(route_request(a=800), [a, b], Work.PROMPT)
    assert chosen is not None
    assert (chosen.replica, chosen.spilled) == (a, False)
    busy = policy("a", "b").one(route_request(a=800), [replace(a, tokens_to_compute=700), b], Work.PROMPT)
    assert busy is not None
    assert busy.replica.worker_id == "a", "700 ms of queue are less than the 800 ms saved"
    busier = policy("a", "b").one(route_request(a=800), [replace(a, tokens_to_compute=900), b], Work.PROMPT)
    assert busier is not None
    assert (busier.replica, busier.preferred, busier.spilled) == (b, "a", True)


def test_a_reported_queue_shrinks_with_the_time_since_the_status():
    clock = ManualClock()
    chooser = policy("a", "b", commitments=Commitments(clock))
    a, b = replica("a"), replica("b")
    busy = replace(a, tokens_to_compute=1000, reported_at=clock.monotonic())

    def chosen() -> str:
        pick = chooser.one(route_request(a=800), [busy, b], Work.PROMPT)
        assert pick is not None
        return pick.replica.worker_id

    assert chosen() == "b", "1 s of queue is longer than the 0.8 s saved"
    clock.advance(0.4)
    assert chosen() == "a", "0.6 s of the queue are left"


def test_a_burst_spreads_by_dispatched_work_while_statuses_are_old():
    commitments = Commitments(ManualClock())
    replicas = [replica(f"w{n}") for n in range(4)]
    names = [one.worker_id for one in replicas]
    chooser = policy(*names, commitments=commitments)
    counts = dict.fromkeys(names, 0)
    for number in range(40):
        chosen = chooser.one(route_request(key=bytes([number])), replicas, Work.PROMPT)
        assert chosen is not None
        counts[chosen.replica.worker_id] += 1
        commitments.add(Commitment(chosen.replica.address, 1000))
    assert set(counts.values()) == {10}


def test_of_equal_replicas_equal_prefixes_take_the_same():
    replicas = [replica(f"w{n}") for n in range(8)]
    chooser = policy(*(one.worker_id for one in replicas))
    for number in range(20):
        key = bytes([number])
        shuffled = random.Random(number).sample(replicas, len(replicas))
        assert chooser.one(route_request(key=key), replicas, Work.WHOLE) == chooser.one(
            route_request(key=key), shuffled, Work.WHOLE
        )
    homes = {chooser.one(route_request(key=bytes([n])), replicas, Work.WHOLE).replica for n in range(200)}
    assert homes == set(replicas)


def test_a_slower_worker_gets_fewer_prompts():
    estimates = estimates_of("fast")
    for number in range(1, 40):
        estimates.observe_prefill(Process(WorkerId("slow"), "1"), 50 * number, 0.004 * 50 * number)
    chosen = policy(estimates=estimates).one(
        route_request(), [replica("fast", tokens_to_compute=2000), replica("slow")], Work.PROMPT
    )
    assert chosen is not None
    assert chosen.replica.worker_id == "fast", "3 s including the queue, against 4 s"


def test_generation_avoids_long_batches_and_full_pools():
    chooser = policy("a", "b")
    chosen = chooser.one(route_request(), [replica("a", 9), replica("b", 1)], Work.GENERATE)
    assert chosen is not None
    assert chosen.replica.worker_id == "b"
    full = replace(replica("b", 1), blocks_free=3)
    chosen = chooser.one(route_request(), [replica("a", 9), full], Work.GENERATE)
    assert chosen is not None
    assert chosen.replica.worker_id == "a"
    assert {one.replica.worker_id: one.terms.room > 0 for one in chosen.ranked} == {"a": False, "b": True}


def test_reserved_room_is_not_used_twice():
    commitments = Commitments(ManualClock())
    chooser = policy("a", "b", commitments=commitments)
    pair = [replica("a"), replica("b")]
    first = chooser.one(route_request(), pair, Work.GENERATE)
    assert first is not None
    commitments.add(Commitment("", 0, first.replica.address, 990))
    second = chooser.one(route_request(), pair, Work.GENERATE)
    assert second is not None
    assert second.replica != first.replica


def test_evicting_blocks_that_are_often_used_has_a_cost():
    estimates = estimates_of("a", "b")
    for _ in range(500):
        estimates.observe_prompt(100, 80)
    full = replace(replica("a"), blocks_cached=1000)
    chosen = policy(estimates=estimates).one(route_request(), [full, replica("b")], Work.PROMPT)
    assert chosen is not None
    assert chosen.replica.worker_id == "b"
    (terms,) = [one.terms for one in chosen.ranked if one.replica is full]
    assert terms.eviction == pytest.approx(1000 * PER_TOKEN * 0.8, rel=0.05)


def test_a_pair_is_chosen_for_its_link():
    estimates = estimates_of("p", "q", "near", "far")
    for source, target, seconds in (("p", "far", 3.0), ("q", "near", 3.0)):
        for number in range(1, 60):
            estimates.observe_transfer(
                Process(WorkerId(source), "1"),
                Process(WorkerId(target), "1"),
                "unknown",
                100 * number,
                seconds * number,
            )
    chosen = policy(estimates=estimates).pair(
        route_request(), [replica("p"), replica("q")], [replica("near"), replica("far")]
    )
    assert chosen is not None
    assert {one.replica.worker_id for one in chosen} in ({"p", "near"}, {"q", "far"})


def test_blocks_cached_by_the_decode_replica_are_not_transferred():
    estimates = estimates_of("p", "a", "b")
    for number in range(1, 60):
        for target in ("a", "b"):
            estimates.observe_transfer(
                Process(WorkerId("p"), "1"), Process(WorkerId(target), "1"), "unknown", 100 * number, 0.1 * number
            )
    chosen = policy(estimates=estimates).pair(route_request(b=960), [replica("p")], [replica("a"), replica("b", 2)])
    assert chosen is not None
    assert chosen[1].replica.worker_id == "b"
    assert chosen[1].terms is not None
    assert chosen[1].terms.transfer == pytest.approx(0.04, rel=0.1)


def test_a_decode_replica_on_the_same_node_is_considered_in_a_large_fleet():
    estimates = estimates_of("p")
    for _ in range(60):
        estimates.observe_transfer(Process(WorkerId("p"), "1"), Process(WorkerId("x"), "1"), "remote", 100, 2.0)
        estimates.observe_transfer(Process(WorkerId("p"), "1"), Process(WorkerId("y"), "1"), "node", 100, 0.01)
    here, there = Place("n1", "z"), Place("n2", "z2")
    far = [replica(f"d{n}", place=there) for n in range(20)]
    near = replica("near", 3, place=here)
    chosen = policy(estimates=estimates).pair(route_request(), [replica("p", place=here)], [*far, near])
    assert chosen is not None
    assert chosen[1].replica == near


def test_a_short_tail_is_computed_by_decode_if_that_is_faster_than_a_pair():
    p, d = replica("p"), replica("d")
    chooser = policy("p", "d")
    route = choose(route_request(d=990), Candidates((p,), (d,)), chooser, enough_tokens=900)
    assert route is not None
    assert route.reason is RouteReason.SHORT_TAIL
    busy = replace(d, tokens_to_compute=5000)
    route = choose(route_request(d=990, p=990), Candidates((p,), (busy,)), chooser, enough_tokens=900)
    assert route is not None
    assert route.reason is RouteReason.PAIR


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 5000), st.integers(0, 1000), st.integers(0, 1200)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 2000),
    st.sampled_from(list(Work)),
)
def test_the_choice_is_within_the_tolerance_of_the_best_and_every_term_is_sane(rows, tokens, work):
    replicas = [
        replace(replica(f"w{n}", load, tokens_to_compute=queue), blocks_free=free, blocks_cached=1000 - free)
        for n, (load, queue, free, _) in enumerate(rows)
    ]
    hits = {f"w{n}": min(hit, tokens - 1) for n, (*_, hit) in enumerate(rows)}
    chosen = LatencyPolicy(Estimates(), Commitments(ManualClock())).one(route_request(tokens, **hits), replicas, work)
    assert chosen is not None
    assert chosen.terms is not None
    totals = [one.terms.total for one in chosen.ranked]
    assert totals == sorted(totals)
    assert chosen.terms.total <= totals[0] * 1.02 + 0.003
    for one in chosen.ranked:
        terms = (
            one.terms.queue,
            one.terms.prefill,
            one.terms.transfer,
            one.terms.decode,
            one.terms.room,
            one.terms.eviction,
        )
        assert all(0 <= seconds < 1e6 for seconds in terms)


def test_without_replicas_nothing_is_chosen():
    assert policy().one(route_request(), [], Work.WHOLE) is None
    assert policy().pair(route_request(), [], [replica("d")]) is None
