"""The rollout planner over whole trajectories, and its bounds in random worlds."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.operator.plan.rollout import PAIRED, Bounds, Count, RoleState, capacity, next_step
from kvferry.operator.pool.spec import RolloutSpec

Ready = Callable[[str, str, int, int], int]
"""(role, revision, desired, ready so far) -> ready after a while."""


def all_ready(role: str, revision: str, desired: int, ready: int) -> int:
    return desired


def world(**roles: tuple[int, Mapping[str, tuple[int, int]]]) -> list[RoleState]:
    return [
        RoleState(name, replicas, {rev: Count(*pods) for rev, pods in revisions.items()})
        for name, (replicas, revisions) in roles.items()
    ]


def apply(roles: list[RoleState], revision: str, rollout: RolloutSpec, ready: Ready) -> list[RoleState]:
    """Return the roles after the next step, with as many ready pods as `ready` returns."""
    step = next_step(roles, revision, rollout)
    after = []
    for role in roles:
        counts = {}
        for rev in {rev for name, rev in step.desired if name == role.name}:
            desired = step.desired[role.name, rev]
            still = min(role.of(rev).ready, desired)
            if desired:
                counts[rev] = Count(desired, max(still, min(desired, ready(role.name, rev, desired, still))))
        after.append(RoleState(role.name, role.replicas, counts))
    return after


def trajectory(roles: list[RoleState], revision: str, rollout: RolloutSpec) -> list[dict[str, dict[str, int]]]:
    seen = []
    for _ in range(100):
        roles = apply(roles, revision, rollout, all_ready)
        seen.append({role.name: {rev: c.desired for rev, c in sorted(role.revisions.items())} for role in roles})
        if next_step(roles, revision, rollout).done:
            return seen
    raise AssertionError(f"the rollout does not end: {seen[-3:]}")


def test_a_new_pool_starts_all_at_once():
    roles = world(prefill=(2, {}), decode=(4, {}))
    assert trajectory(roles, "b", RolloutSpec()) == [{"prefill": {"b": 2}, "decode": {"b": 4}}]


def test_two_prefill_and_four_decode_move_pair_by_pair():
    roles = world(prefill=(2, {"a": (2, 2)}), decode=(4, {"a": (4, 4)}))
    assert trajectory(roles, "b", RolloutSpec()) == [
        {"prefill": {"a": 2, "b": 1}, "decode": {"a": 4, "b": 1}},
        {"prefill": {"a": 2, "b": 1}, "decode": {"a": 3, "b": 2}},
        {"prefill": {"a": 1, "b": 2}, "decode": {"a": 2, "b": 3}},
        {"prefill": {"a": 1, "b": 2}, "decode": {"a": 1, "b": 4}},
        {"prefill": {"b": 2}, "decode": {"b": 4}},
    ]


def test_without_surge_a_pod_is_removed_before_one_is_added():
    rollout = RolloutSpec(max_surge="0", max_unavailable="1")
    roles = world(prefill=(1, {"a": (1, 1)}), decode=(2, {"a": (2, 2)}))
    first = next_step(roles, "b", rollout)
    assert sum(n for (role, _), n in first.desired.items() if role == "decode") == 2
    assert trajectory(roles, "b", rollout)[-1] == {"prefill": {"b": 1}, "decode": {"b": 2}}


def test_a_revision_that_never_gets_ready_removes_no_pod():
    roles = world(prefill=(2, {"a": (2, 2)}), decode=(2, {"a": (2, 2)}))
    for _ in range(20):
        roles = apply(roles, "b", RolloutSpec(), lambda role, rev, desired, ready: 0 if rev == "b" else desired)
    assert [role.of("a") for role in roles] == [Count(2, 2), Count(2, 2)]
    assert "0 of 2 pods updated" in next_step(roles, "b", RolloutSpec()).waiting_for


def test_a_rollback_in_mid_rollout_keeps_the_capacity():
    roles = world(prefill=(2, {"a": (2, 2)}), decode=(4, {"a": (4, 4)}))
    for _ in range(2):
        roles = apply(roles, "b", RolloutSpec(), all_ready)
    while not next_step(roles, "a", RolloutSpec()).done:
        roles = apply(roles, "a", RolloutSpec(), all_ready)
        assert capacity(roles) >= 1
    assert [dict(role.revisions) for role in roles] == [{"a": Count(2, 2)}, {"a": Count(4, 4)}]


def test_a_paused_rollout_scales_present_revisions_and_starts_none():
    roles = world(prefill=(3, {"a": (2, 2)}), decode=(1, {"a": (2, 2)}))
    step = next_step(roles, "b", RolloutSpec(paused=True))
    assert step.desired == {("prefill", "a"): 3, ("decode", "a"): 1}
    assert step.waiting_for.startswith("paused")


def test_a_paused_pool_that_never_ran_starts_nothing():
    step = next_step(world(prefill=(1, {}), decode=(1, {})), "a", RolloutSpec(paused=True))
    assert step.desired == {}
    assert not step.done


def test_a_sleeping_role_is_no_obstacle():
    roles = world(prefill=(0, {"a": (0, 0)}), decode=(0, {"a": (1, 1)}))
    assert next_step(roles, "b", RolloutSpec()).desired["decode", "a"] == 0
    assert trajectory(roles, "b", RolloutSpec())[-1] == {"prefill": {}, "decode": {}}


def test_the_worse_of_two_old_revisions_is_removed_first():
    roles = world(both=(4, {"a": (3, 3), "b": (1, 1), "c": (1, 1)}))
    step = next_step(roles, "c", RolloutSpec())
    assert (step.desired["both", "a"], step.desired["both", "b"]) == (3, 0)


def test_a_change_during_a_rollout_makes_progress():
    """The surplus pods of the overtaken revision had used up the whole surge on a cluster."""
    roles = world(
        prefill=(2, {"a": (2, 2), "b": (1, 1)}),
        decode=(4, {"a": (3, 3), "b": (1, 1), "c": (1, 1)}),
    )
    steps = trajectory(roles, "c", RolloutSpec())
    assert steps[-1] == {"prefill": {"c": 2}, "decode": {"c": 4}}
    assert all(sum(step["prefill"].values()) <= 3 and sum(step["decode"].values()) <= 5 for step in steps)


def leaving(**roles: tuple[int, Mapping[str, tuple[int, int]]]) -> list[RoleState]:
    return [replace(role, is_leaving=True) for role in world(**roles)]


def test_roles_that_leave_serve_until_those_that_come_can():
    old = leaving(prefill=(0, {"a": (2, 2)}), decode=(0, {"a": (4, 4)}))
    starting = next_step([*old, *world(both=(3, {"b": (3, 2)}))], "b", RolloutSpec())
    assert (starting.desired["prefill", "a"], starting.desired["decode", "a"]) == (2, 4)
    assert "decode: removed from the spec, 4 pods left" in starting.waiting_for
    there = next_step([*old, *world(both=(3, {"b": (3, 3)}))], "b", RolloutSpec())
    assert (there.desired["prefill", "a"], there.desired["decode", "a"]) == (0, 0)
    assert not there.done
    assert next_step(world(both=(3, {"b": (3, 3)})), "b", RolloutSpec()).done


def test_a_paused_rollout_removes_no_role():
    old = leaving(both=(0, {"a": (3, 3)}))
    step = next_step(
        [*old, *world(prefill=(1, {"b": (1, 1)}), decode=(1, {"b": (1, 1)}))], "b", RolloutSpec(paused=True)
    )
    assert step.desired["both", "a"] == 3


def test_scaling_in_a_paused_rollout_keeps_a_pair():
    roles = world(prefill=(2, {"a": (3, 3), "b": (3, 3)}), decode=(1, {"a": (5, 5), "b": (3, 3)}))
    after = apply(roles, "b", RolloutSpec(paused=True), all_ready)
    assert capacity(after) >= 1


amounts = st.sampled_from(["0", "1", "2", "25%", "50%", "100%"])
rollouts = st.builds(
    RolloutSpec, max_surge=amounts, max_unavailable=amounts, max_skew=st.sampled_from([0.01, 0.1, 0.25, 0.5, 1.0])
).filter(lambda r: not (r.max_surge == "0" and r.max_unavailable == "0"))


@settings(max_examples=200, deadline=None)
@given(
    replicas=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4)),
    rollout=rollouts,
    targets=st.lists(st.sampled_from("abc"), min_size=1, max_size=5),
    steps=st.integers(1, 6),
    readiness=st.randoms(use_true_random=False),
)
def test_the_bounds_of_a_rollout_hold(replicas, rollout, targets, steps, readiness):
    """In every step surge and availability stay within their bounds, in any order of readiness and for any changes of
    the target; the rollout ends.
    """
    names = ("prefill", "decode", "both")
    roles = [RoleState(name, n, {"a": Count(n, n)}) for name, n in zip(names, replicas, strict=True)]
    bounds = {role.name: Bounds.of(rollout, role.replicas) for role in roles}

    live: list[int] = []

    def slowly(role: str, rev: str, desired: int, ready: int) -> int:
        return readiness.randint(ready, desired)

    def check(roles: list[RoleState]) -> None:
        for role in roles:
            assert role.total <= role.replicas + bounds[role.name].surge
            assert role.ready >= role.replicas - bounds[role.name].unavailable
        paired = [role for role in roles if role.name in PAIRED]
        live.append(len({rev for role in paired for rev in role.pods}))
        if max(live) > 2:
            return  # a change overtook another, so only the bounds of each role are guaranteed
        floor = 1 - max(Fraction(bounds[role.name].unavailable, role.replicas) for role in paired)
        assert capacity(paired) >= floor

    for target in targets:
        for _ in range(steps):
            roles = apply(roles, target, rollout, slowly)
            check(roles)
    for _ in range(200):
        roles = apply(roles, targets[-1], rollout, all_ready)
        check(roles)
        if next_step(roles, targets[-1], rollout).done:
            break
    assert all(dict(role.revisions) == {targets[-1]: Count(role.replicas, role.replicas)} for role in roles)


@settings(max_examples=200, deadline=None)
@given(
    had=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    replicas=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    rollout=rollouts,
)
def test_a_change_of_pods_and_of_numbers_at_once_ends(had, replicas, rollout):
    roles = [
        RoleState(name, n, {"a": Count(was, was)})
        for name, n, was in zip(("prefill", "decode"), replicas, had, strict=True)
    ]
    for _ in range(100):
        if next_step(roles, "b", rollout).done:
            break
        roles = apply(roles, "b", rollout, all_ready)
    assert [role.of("b").ready for role in roles] == list(replicas)
    assert all(role.total == role.of("b").desired for role in roles)


@settings(max_examples=100, deadline=None)
@given(replicas=st.tuples(st.integers(1, 12), st.integers(1, 12)), rollout=rollouts)
def test_no_role_gets_ahead_by_more_than_max_skew(replicas, rollout):
    roles = [RoleState(name, n, {"a": Count(n, n)}) for name, n in zip(("prefill", "decode"), replicas, strict=True)]
    while not next_step(roles, "b", rollout).done:
        before = min(role.share("b") for role in roles)
        roles = apply(roles, "b", rollout, all_ready)
        for role in roles if any(role.of("a").desired for role in roles) else ():
            ahead = Fraction(role.of("b").desired, role.replicas) - before
            assert ahead <= Fraction(str(rollout.max_skew)) + Fraction(1, role.replicas)
