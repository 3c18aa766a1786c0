"""Rollout: computes the next step of a joint update of prefill and decode. Pure and stateless.

A request is served by a pair: a prefill and a decode pod of one revision. The capacity of a revision is therefore the
smaller of its roles' shares of ready pods, ready / replicas, and the capacity of the pool is the sum over revisions.
A step

- starts new pods of a role up to replicas + maxSurge in total, at most maxSkew ahead of the other role;
- removes an old pod if it is not ready, or if afterwards the role still has replicas - maxUnavailable ready pods and
  the capacity is at least 1 - maxUnavailable / replicas, or at least as before.

If there are several old revisions, the revision with the least capacity is removed first. With one old revision the
rollout always completes: let q be the role with the smallest new share, with its surge in use; removing an old pod from
q leaves old share + new share >= 1, so q can always proceed. A change during a rollout leaves three revisions, whose
unpaired pods can use up the surge; if no other step is possible, the old pod that costs the least capacity is removed,
within replicas - maxUnavailable of its role.

The role `both` is updated independently. Compare LeaderWorkerSet, KEP-846 (DisaggregatedSet), whose planner updates
roles in proportion, but does not bound the number of pairs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from kvferry.operator.pool.spec import RolloutSpec, pods_of

PAIRED = frozenset({"prefill", "decode"})
"""Roles that serve requests only together."""


@dataclass(frozen=True, slots=True)
class Count:
    """Numbers of pods of a role at a revision."""

    desired: int = 0
    """Desired number of pods: `spec.replicas` of the Deployment."""
    ready: int = 0


@dataclass(frozen=True, slots=True)
class RoleState:
    """Observed pods of one role."""

    name: str
    replicas: int
    """Number of pods that the role should have."""
    revisions: Mapping[str, Count] = field(default_factory=dict)
    is_leaving: bool = False
    """Whether the role was removed from the spec; it serves until the roles in the spec are ready."""

    def of(self, revision: str) -> Count:
        """Return the numbers of pods at `revision`."""
        return self.revisions.get(revision, Count())

    @property
    def pods(self) -> Mapping[str, int]:
        """Numbers of pods by revision, without revisions that have no pods."""
        return {revision: count.desired for revision, count in self.revisions.items() if count.desired}

    @property
    def total(self) -> int:
        """Number of pods of all revisions."""
        return sum(count.desired for count in self.revisions.values())

    @property
    def ready(self) -> int:
        """Number of ready pods of all revisions."""
        return sum(count.ready for count in self.revisions.values())

    def share(self, revision: str) -> Fraction:
        """Return the ratio of ready pods at `revision` to the replicas of the role, at most 1."""
        return min(Fraction(1), Fraction(self.of(revision).ready, self.replicas)) if self.replicas else Fraction(1)

    def with_desired(self, revision: str, desired: int) -> "RoleState":
        """Return the role with `desired` pods at `revision`; unready pods are removed first."""
        count = self.of(revision)
        return replace(self, revisions={**self.revisions, revision: Count(desired, min(count.ready, desired))})


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds on a role's deviation from its number of replicas."""

    surge: int
    unavailable: int

    @classmethod
    def of(cls, rollout: RolloutSpec, replicas: int) -> "Bounds":
        """Compute the bounds from the rollout settings. If both bounds are 0 after rounding, one pod may be
        unavailable.

        Args:
            rollout: the rollout settings.
            replicas: desired number of pods of the role, to which percentages apply.
        """
        surge = pods_of(rollout.max_surge, replicas, up=True)
        unavailable = min(replicas, pods_of(rollout.max_unavailable, replicas, up=False))
        return cls(surge, 1 if surge == 0 and unavailable == 0 else unavailable)


@dataclass(frozen=True, slots=True)
class Step:
    """Next step of a rollout: numbers of replicas to apply."""

    desired: Mapping[tuple[str, str], int]
    """Desired number of pods by (role, revision)."""
    done: bool
    """Whether only the target revision has pods, all of them are ready, and their number is that of the role's
    replicas."""
    waiting_for: str
    """Reason why the rollout is not complete; empty when done."""


def next_step(roles: Sequence[RoleState], revision: str, rollout: RolloutSpec) -> Step:
    """Compute the numbers of replicas to apply now."""
    staying = [role for role in roles if not role.is_leaving]
    leaving = [role for role in roles if role.is_leaving]
    paired = [role for role in staying if role.name in PAIRED]
    groups = [paired] if paired else []
    groups += [[role] for role in staying if role.name not in PAIRED]
    if rollout.paused:
        after = [role for group in groups for role in _hold(group, rollout)]
    else:
        after = [role for group in groups for role in _advance(group, revision, rollout)]
        if not _waiting_for(staying, revision, rollout):
            leaving = [_emptied(role) for role in leaving]
    after += leaving
    desired = {(role.name, rev): count.desired for role in after for rev, count in role.revisions.items()}
    waiting = _waiting_for(roles, revision, rollout)
    return Step(desired, not waiting, waiting)


def capacity(roles: Sequence[RoleState]) -> Fraction:
    """Compute the capacity of roles that serve together: the sum over revisions of the smallest ready share."""
    scaled = [role for role in roles if role.replicas]
    revisions = {revision for role in scaled for revision in role.revisions}
    return sum((min(role.share(revision) for role in scaled) for revision in revisions), Fraction(0))


def _advance(group: list[RoleState], revision: str, rollout: RolloutSpec) -> list[RoleState]:
    bounds = {role.name: Bounds.of(rollout, role.replicas) for role in group}
    moving = any(count.desired for role in group for rev, count in role.revisions.items() if rev != revision)
    if not moving:
        return [role.with_desired(revision, role.replicas) for role in group]
    skew = Fraction(str(rollout.max_skew))
    after = _start(_retire(group, revision, bounds), revision, bounds, skew)
    arrived = all(role.of(revision).ready == role.of(revision).desired for role in group)
    if arrived and [role.pods for role in after] == [role.pods for role in group]:
        after = _start(_unblock(group, revision, bounds), revision, bounds, skew)
    return after


def _start(group: list[RoleState], revision: str, bounds: Mapping[str, Bounds], skew: Fraction) -> list[RoleState]:
    lowest_share = min(role.share(revision) for role in group)
    started = []
    for role in group:
        now = role.of(revision).desired
        others = role.total - now
        room = role.replicas + bounds[role.name].surge - others
        ahead = math.ceil(role.replicas * (lowest_share + skew))
        number = min(role.replicas, max(now, min(room, ahead)))
        started.append(role.with_desired(revision, max(0, number)))
    return started


def _retire(group: list[RoleState], revision: str, bounds: Mapping[str, Bounds]) -> list[RoleState]:
    roles = {role.name: role for role in group}
    floor = 1 - max(
        (Fraction(bounds[role.name].unavailable, role.replicas) for role in group if role.replicas), default=Fraction(0)
    )
    moved = True
    while moved:
        moved = False
        for name, old in _victims(list(roles.values()), revision):
            before = roles[name]
            after = before.with_desired(old, before.of(old).desired - 1)
            costs_nothing = after.ready == before.ready
            enough = after.ready >= before.replicas - bounds[name].unavailable
            rest = [after, *(role for role in roles.values() if role.name != name)]
            # If the number of replicas was raised, the capacity may already be below the floor.
            kept = capacity(rest) >= min(floor, capacity(list(roles.values())))
            if before.replicas == 0 or costs_nothing or (enough and kept):
                roles[name] = after
                moved = True
                break
    return [roles[role.name] for role in group]


def _unblock(group: list[RoleState], revision: str, bounds: Mapping[str, Bounds]) -> list[RoleState]:
    """Remove the old pod that costs the least capacity, so that a blocked rollout proceeds."""
    found = []
    for name, old in _victims(group, revision):
        role = next(role for role in group if role.name == name)
        after = role.with_desired(old, role.of(old).desired - 1)
        if after.ready >= role.replicas - bounds[name].unavailable:
            rest = [after if other.name == name else other for other in group]
            found.append((capacity(rest), rest))
    return max(found, key=lambda entry: entry[0])[1] if found else group


def _victims(roles: list[RoleState], revision: str) -> list[tuple[str, str]]:
    """List the old revisions as (role, revision), in the order in which they lose pods."""
    found = []
    for role in roles:
        for old, count in role.revisions.items():
            if old == revision or count.desired == 0:
                continue
            pair = min(other.share(old) for other in roles)
            found.append((count.desired <= count.ready, pair, -role.share(old), old, role.name))
    return [(name, old) for *_, old, name in sorted(found)]


def _hold(group: list[RoleState], rollout: RolloutSpec) -> list[RoleState]:
    """Scale only the revision with the most capacity, which is the same for all roles, since a pair needs a common
    revision."""
    revisions = {revision for role in group for revision in role.revisions}
    if not revisions:
        return group

    def serves(revision: str) -> tuple[Fraction, int, str]:
        return min(role.share(revision) for role in group), sum(role.of(revision).ready for role in group), revision

    leading = max(revisions, key=serves)
    return [_scaled(role, leading, Bounds.of(rollout, role.replicas)) for role in group]


def _scaled(role: RoleState, leading: str, bounds: Bounds) -> RoleState:
    others = role.total - role.of(leading).desired
    lowest = role.replicas - others
    highest = lowest + (bounds.surge if others else 0)
    return role.with_desired(leading, max(0, min(max(role.of(leading).desired, lowest), highest)))


def _emptied(role: RoleState) -> RoleState:
    return replace(role, revisions=dict.fromkeys(role.revisions, Count()))


def _waiting_for(roles: Sequence[RoleState], revision: str, rollout: RolloutSpec) -> str:
    behind = []
    for role in roles:
        new = role.of(revision)
        old = role.total - new.desired
        if role.is_leaving:
            behind += [f"{role.name}: removed from the spec, {role.total} pods left"] if role.total else []
        elif old:
            good = min(new.ready, role.replicas)
            behind.append(f"{role.name}: {good} of {role.replicas} pods updated and ready, {old} old pods left")
        elif new.desired > role.replicas:
            behind.append(f"{role.name}: {new.desired - role.replicas} more pods than desired")
        elif new.ready < role.replicas or new.desired != role.replicas:
            behind.append(f"{role.name}: {new.ready} of {role.replicas} pods ready")
    if behind and rollout.paused:
        behind.insert(0, "paused by spec.rollout.paused")
    return "; ".join(behind)
