"""The next step of a rollout that moves prefill and decode together. Pure, and it remembers nothing.

What serves a request is a pair: a prefill and a decode pod of one revision. So a revision's share of the work is
the smaller of its roles' shares of ready pods, ready / wanted, and the shares of all revisions add up to what the
pool can do. A step

- starts new pods of a role up to wanted + maxSurge in all, and no further ahead of the other role than maxSkew;
- takes an old pod away if it is not ready, or if afterwards the role still has wanted - maxUnavailable ready pods
  and the shares still add up to 1 - maxUnavailable / wanted, or to no less than they did.

Among the old revisions the one that serves least goes first. With one old revision this always ends: let q be the
role whose new share is the smallest, with its surge in use; taking an old pod from q leaves old share + new share
>= 1, so q can always move. A change that overtakes another leaves three revisions, whose odd pods without a partner
can use the surge up; when nothing else can move, the old pod goes whose loss costs the least of the shares, within
wanted - maxUnavailable of its role all the same.
A role on its own (combined) is a group of one. Compare LeaderWorkerSet, KEP-846 (DisaggregatedSet), whose planner
moves roles in proportion; it does not bound the pairs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from kvferry.operator.spec import Rollout, pods_of

PAIRED = frozenset({"prefill", "decode"})
"""Roles that serve only together; any other serves alone."""


@dataclass(frozen=True, slots=True)
class Count:
    """Pods of one role at one revision."""

    desired: int = 0
    """That its Deployment is to have."""
    ready: int = 0


@dataclass(frozen=True, slots=True)
class RoleState:
    """One role at one moment."""

    name: str
    wanted: int
    revisions: Mapping[str, Count] = field(default_factory=dict)
    is_leaving: bool = False
    """The spec has it no longer; it serves until those that the spec has can."""

    def of(self, revision: str) -> Count:
        """The pods at `revision`."""
        return self.revisions.get(revision, Count())

    @property
    def pods(self) -> Mapping[str, int]:
        """Pods by revision, where there are any."""
        return {revision: count.desired for revision, count in self.revisions.items() if count.desired}

    @property
    def total(self) -> int:
        """Pods in all."""
        return sum(count.desired for count in self.revisions.values())

    @property
    def ready(self) -> int:
        """Ready pods in all."""
        return sum(count.ready for count in self.revisions.values())

    def share(self, revision: str) -> Fraction:
        """Ready pods of those wanted, at most 1."""
        return min(Fraction(1), Fraction(self.of(revision).ready, self.wanted)) if self.wanted else Fraction(1)

    def with_desired(self, revision: str, desired: int) -> "RoleState":
        """This role with another number of pods at `revision`; of pods taken away, unready ones go first."""
        count = self.of(revision)
        return replace(self, revisions={**self.revisions, revision: Count(desired, min(count.ready, desired))})


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a role may stray from the pods wanted."""

    surge: int
    unavailable: int

    @classmethod
    def of(cls, rollout: Rollout, wanted: int) -> "Bounds":
        """From the pool's own words; both 0 after rounding would never move, so one may be missing then."""
        surge = pods_of(rollout.max_surge, wanted, up=True)
        unavailable = min(wanted, pods_of(rollout.max_unavailable, wanted, up=False))
        return cls(surge, 1 if surge == 0 and unavailable == 0 else unavailable)


@dataclass(frozen=True, slots=True)
class Step:
    """What the Deployments are to have next."""

    desired: Mapping[tuple[str, str], int]
    """By role and revision."""
    done: bool
    """Only the wanted revision has pods, all are ready, and as many as wanted."""
    waiting_for: str
    """What the next step needs; empty when done."""


def next_step(roles: Sequence[RoleState], revision: str, rollout: Rollout) -> Step:
    """The numbers to apply now."""
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
    """The shares of all revisions of one group together."""
    awake = [role for role in roles if role.wanted]
    revisions = {revision for role in awake for revision in role.revisions}
    return sum((min(role.share(revision) for role in awake) for revision in revisions), Fraction(0))


def _advance(group: list[RoleState], revision: str, rollout: Rollout) -> list[RoleState]:
    bounds = {role.name: Bounds.of(rollout, role.wanted) for role in group}
    moving = any(count.desired for role in group for rev, count in role.revisions.items() if rev != revision)
    if not moving:
        return [role.with_desired(revision, role.wanted) for role in group]
    skew = Fraction(rollout.max_skew, 100)
    after = _start(_retire(group, revision, bounds), revision, bounds, skew)
    arrived = all(role.of(revision).ready == role.of(revision).desired for role in group)
    if arrived and [role.pods for role in after] == [role.pods for role in group]:
        after = _start(_give_way(group, revision, bounds), revision, bounds, skew)
    return after


def _start(group: list[RoleState], revision: str, bounds: Mapping[str, Bounds], skew: Fraction) -> list[RoleState]:
    least = min(role.share(revision) for role in group)
    started = []
    for role in group:
        now = role.of(revision).desired
        others = role.total - now
        room = role.wanted + bounds[role.name].surge - others
        ahead = math.ceil(role.wanted * (least + skew))
        wish = min(role.wanted, max(now, min(room, ahead)))
        started.append(role.with_desired(revision, max(0, wish)))
    return started


def _retire(group: list[RoleState], revision: str, bounds: Mapping[str, Bounds]) -> list[RoleState]:
    roles = {role.name: role for role in group}
    floor = 1 - max(
        (Fraction(bounds[role.name].unavailable, role.wanted) for role in group if role.wanted), default=Fraction(0)
    )
    moved = True
    while moved:
        moved = False
        for name, old in _victims(list(roles.values()), revision):
            before = roles[name]
            after = before.with_desired(old, before.of(old).desired - 1)
            costs_nothing = after.ready == before.ready
            enough = after.ready >= before.wanted - bounds[name].unavailable
            rest = [after, *(role for role in roles.values() if role.name != name)]
            # Less than the floor there may be from the start, where more pods are wanted than there were.
            kept = capacity(rest) >= min(floor, capacity(list(roles.values())))
            if before.wanted == 0 or costs_nothing or (enough and kept):
                roles[name] = after
                moved = True
                break
    return [roles[role.name] for role in group]


def _give_way(group: list[RoleState], revision: str, bounds: Mapping[str, Bounds]) -> list[RoleState]:
    """Take the one old pod away that costs the least, so that a standstill ends."""
    found = []
    for name, old in _victims(group, revision):
        role = next(role for role in group if role.name == name)
        after = role.with_desired(old, role.of(old).desired - 1)
        if after.ready >= role.wanted - bounds[name].unavailable:
            rest = [after if other.name == name else other for other in group]
            found.append((capacity(rest), rest))
    return max(found, key=lambda entry: entry[0])[1] if found else group


def _victims(roles: list[RoleState], revision: str) -> list[tuple[str, str]]:
    """Old pods, as (role, revision), in the order in which they may go."""
    found = []
    for role in roles:
        for old, count in role.revisions.items():
            if old == revision or count.desired == 0:
                continue
            pair = min(other.share(old) for other in roles)
            found.append((count.desired <= count.ready, pair, -role.share(old), old, role.name))
    return [(name, old) for *_, old, name in sorted(found)]


def _hold(group: list[RoleState], rollout: Rollout) -> list[RoleState]:
    """Scale without changing which revision leads; the same one for all roles, or no pair might be left."""
    revisions = {revision for role in group for revision in role.revisions}
    if not revisions:
        return group

    def serves(revision: str) -> tuple[Fraction, int, str]:
        return min(role.share(revision) for role in group), sum(role.of(revision).ready for role in group), revision

    leading = max(revisions, key=serves)
    return [_scaled(role, leading, Bounds.of(rollout, role.wanted)) for role in group]


def _scaled(role: RoleState, leading: str, bounds: Bounds) -> RoleState:
    others = role.total - role.of(leading).desired
    lowest = role.wanted - others
    highest = lowest + (bounds.surge if others else 0)
    return role.with_desired(leading, max(0, min(max(role.of(leading).desired, lowest), highest)))


def _emptied(role: RoleState) -> RoleState:
    return replace(role, revisions=dict.fromkeys(role.revisions, Count()))


def _waiting_for(roles: Sequence[RoleState], revision: str, rollout: Rollout) -> str:
    behind = []
    for role in roles:
        new = role.of(revision)
        old = role.total - new.desired
        if role.is_leaving:
            behind += [f"{role.name}: leaves, {role.total} pods left"] if role.total else []
        elif old:
            behind.append(f"{role.name}: {new.ready} of {role.wanted} pods updated and ready, {old} old ones left")
        elif new.ready < role.wanted or new.desired != role.wanted:
            behind.append(f"{role.name}: {new.ready} of {role.wanted} pods ready")
    if behind and rollout.paused:
        behind.insert(0, "paused by spec.rollout.paused")
    return "; ".join(behind)
