"""What a change of a pool will do, step by step, by the planner that will do it. Pure but for reading the file."""

import json
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import yaml

from kvferry.core.errors import UsageError
from kvferry.operator.rollout import PAIRED, Count, RoleState, capacity, next_step
from kvferry.operator.spec import Pool, parse_pool
from kvferry.operator.workers import revision_of

_MAX_BYTES = 4 << 20
_MAX_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step, once its new pods are ready."""

    pods: dict[str, dict[str, int]]
    """By role and revision."""
    capacity: Fraction
    """What is left to serve between this step and the next: the share of the pairs wanted."""


@dataclass(frozen=True, slots=True)
class Preview:
    """A change of a pool."""

    name_differs: bool
    old: str
    new: str
    """Revisions."""
    steps: tuple[PlannedStep, ...]

    @property
    def restarts(self) -> bool:
        """Whether pods are replaced, rather than only added or taken away."""
        return self.old != self.new

    def as_text(self) -> str:
        """For people."""
        head = (
            f"revision {self.old} -> {self.new}: every worker pod is replaced"
            if self.restarts
            else (f"revision {self.old} stays: no pod is replaced")
        )
        lines = [head]
        for i, step in enumerate(self.steps, 1):
            roles = "   ".join(
                f"{role} " + (" + ".join(f"{n} {rev}" for rev, n in revisions.items()) or "0")
                for role, revisions in step.pods.items()
            )
            lines.append(f"{i:>3}. {roles}   serving at least {float(step.capacity):.0%}")
        return "\n".join(lines if self.steps else [*lines, "nothing to do"])

    def as_json(self) -> str:
        """For programs."""
        return json.dumps(
            {
                "old": self.old,
                "new": self.new,
                "restarts": self.restarts,
                "steps": [{"pods": step.pods, "capacity": float(step.capacity)} for step in self.steps],
            }
        )


def read_pool(path: Path) -> Pool:
    """The InferencePool in a YAML file.

    Raises:
        UsageError: there is none, or it is not understood.
    """
    try:
        documents = list(yaml.safe_load_all(path.read_bytes()[:_MAX_BYTES]))
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: {error}", field="pool") from error
    found = [d for d in documents if isinstance(d, dict) and d.get("kind") == "InferencePool"]
    if len(found) != 1:
        raise UsageError(f"{path} has {len(found)} objects of kind InferencePool, it must have one", field="pool")
    return parse_pool(found[0])


def preview(old: Pool, new: Pool, default_image: str) -> Preview:
    """The steps from a settled `old` to `new`, if every pod gets ready."""
    before, after = revision_of(old, default_image), revision_of(new, default_image)
    after = new.spec.rollout.rollback_to or after
    names = dict.fromkeys([*(r.name for r in new.spec.roles), *(r.name for r in old.spec.roles)])
    roles = []
    for name in names:
        was, wanted = old.spec.role(name), new.spec.role(name)
        counts = {before: Count(was.replicas, was.replicas)} if was is not None and was.replicas else {}
        roles.append(RoleState(name, wanted.replicas if wanted is not None else 0, counts, wanted is None))
    steps: list[PlannedStep] = []
    while len(steps) < _MAX_STEPS:
        step = next_step(roles, after, new.spec.rollout)
        told = {key: pods for key, pods in step.desired.items() if pods}
        if step.done or told == {(r.name, rev): c.desired for r in roles for rev, c in r.revisions.items()}:
            break
        shrunk = [
            replace(
                role,
                revisions={
                    rev: Count(n, min(n, role.of(rev).ready)) for (name, rev), n in told.items() if name == role.name
                },
            )
            for role in roles
        ]
        serving = [role for role in shrunk if role.is_leaving] or shrunk
        paired = [role for role in serving if role.name in PAIRED] or serving
        steps.append(
            PlannedStep(
                {role.name: {rev: c.desired for rev, c in sorted(role.revisions.items())} for role in shrunk},
                min(Fraction(1), capacity(paired)),
            )
        )
        roles = [
            replace(role, revisions={rev: Count(c.desired, c.desired) for rev, c in role.revisions.items()})
            for role in shrunk
        ]
    return Preview(old.name != new.name, before, after, tuple(steps))
