"""Routing policies by name, and the policies that ignore caches."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.clock import ManualClock
from kvferry.core.errors import UsageError
from kvferry.core.ids import WorkerId
from kvferry.gateway.decide.config import POLICIES
from kvferry.gateway.decide.estimates.estimates import Commitments, Estimates
from kvferry.gateway.decide.routing.plain_policies import least_loaded, round_robin, uniform
from kvferry.gateway.decide.routing.policies import RoutingPolicies, make_policy
from kvferry.gateway.decide.routing.routes import Candidates, Replica, RouteRequest, Work, choose


def replica(name: str, load: int = 0, fingerprint: bytes = b"f") -> Replica:
    return Replica(f"{name}:1", WorkerId(name), fingerprint, load)


ASKED = RouteRequest(lambda _: b"k")
THREE = [replica("b", 2), replica("a", 1), replica("c", 3)]


def make(name: str):
    return make_policy(name, Estimates(), Commitments(ManualClock()), load_factor=1.25, seed=3)


@pytest.mark.parametrize("name", POLICIES)
@given(
    loads=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    prints=st.lists(st.sampled_from([b"f", b"g"]), min_size=5, max_size=5),
)
def test_each_policy_pairs_only_equal_fingerprints(name, loads, prints):
    replicas = tuple(replica(f"w{n}", load, prints[n]) for n, load in enumerate(loads))
    route = choose(
        ASKED,
        Candidates(replicas, tuple(replace(r, worker_id=WorkerId("d" + r.worker_id)) for r in replicas)),
        make(name),
    )
    assert route is not None
    assert route.prefill is not None
    assert route.prefill.replica.fingerprint == route.decode.replica.fingerprint


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_has_no_choice_without_replicas(name):
    assert make(name).one(ASKED, [], Work.WHOLE) is None
    assert make(name).pair(ASKED, [], []) is None


def test_an_unknown_policy_is_refused_with_the_names():
    with pytest.raises(UsageError, match="least-loaded"):
        make("fastest")


def test_round_robin_takes_turns_by_name_and_share():
    policy = round_robin()
    names = [policy.one(ASKED, THREE, Work.WHOLE).replica.worker_id for _ in range(6)]
    assert names == ["a", "b", "c"] * 2
    assert policy.one(ASKED, THREE, Work.PROMPT).replica.worker_id == "a"


def test_least_loaded_takes_the_fewest_requests():
    assert least_loaded().one(ASKED, THREE, Work.WHOLE).replica.worker_id == "a"


def test_random_draws_each_and_repeats_with_a_seed():
    draws = [
        [uniform_.one(ASKED, THREE, Work.WHOLE).replica.worker_id for _ in range(30)]
        for uniform_ in (uniform(1), uniform(1))
    ]
    assert draws[0] == draws[1]
    assert set(draws[0]) == {"a", "b", "c"}


def test_notes_contain_the_choices_of_the_other_policies():
    policies = RoutingPolicies("latency", Estimates(), Commitments(ManualClock()), load_factor=1.25)
    candidates = Candidates(tuple(THREE), (replica("d"),))
    others = policies.others(ASKED, lambda policy: choose(ASKED, candidates, policy))
    assert {other.policy for other in others} == set(POLICIES) - {"latency"}
    assert {other.decode for other in others} == {"d"}
    assert [other.prefill for other in others if other.policy == "least-loaded"] == ["a"]
    assert all(other.seconds > 0 for other in others)
