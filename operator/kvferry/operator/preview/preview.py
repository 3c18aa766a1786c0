"""Preview of a change to a pool, computed with the operator's planner. Pure, except that `read_change` reads files."""

import json
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kvferry.core.errors import UsageError
from kvferry.operator.objects.worker_pods import revision_of
from kvferry.operator.plan.actions import Action, as_json
from kvferry.operator.plan.pool_plan import Plan
from kvferry.operator.plan.rollout import PAIRED, Count, capacity
from kvferry.operator.pool import names
from kvferry.operator.pool.spec import InferencePool, Json, parse_pool
from kvferry.operator.preview.admission import refusals
from kvferry.operator.preview.definition import pool_schema, with_defaults
from kvferry.operator.preview.simulation import SimulatedCluster

_MAX_BYTES = 4 << 20
_MAX_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step of a previewed rollout."""

    pods: dict[str, dict[str, int]]
    """Number of pods by role, then by revision."""
    capacity: Fraction
    """Share of the desired pairs that can serve until the step's new pods are ready."""


@dataclass(frozen=True, slots=True)
class Preview:
    """Preview of a change to a pool."""

    old: str
    new: str
    """Revision after the change; `old` is the revision before it."""
    steps: tuple[PlannedStep, ...]
    passes: tuple[tuple[Action, ...], ...]
    """Actions of each reconcile, without status and events, which depend on the outcome."""

    @property
    def restarts(self) -> bool:
        """Whether pods are replaced, rather than only added or removed."""
        return self.old != self.new

    def as_text(self) -> str:
        """Format the preview as text."""
        head = (
            f"revision {self.old} -> {self.new}: every worker pod is replaced"
            if self.restarts
            else (f"revision {self.old} stays: no pods are replaced")
        )
        lines = [head]
        for i, step in enumerate(self.steps, 1):
            roles = "   ".join(
                f"{role} " + (" + ".join(f"{n} {rev}" for rev, n in revisions.items()) or "0")
                for role, revisions in step.pods.items()
            )
            lines.append(f"{i:>3}. {roles}   serving at least {float(step.capacity):.0%}")
        lines += [] if self.steps else ["no pods are added or removed"]
        lines.append("writes, by reconcile:" if self.passes else "nothing to do")
        for i, actions in enumerate(self.passes, 1):
            lines += [f"{i if j == 0 else '':>3}{'.' if j == 0 else ' '} {a.summary}" for j, a in enumerate(actions)]
        return "\n".join(lines)

    def as_json(self) -> str:
        """Format the preview as one JSON object."""
        return json.dumps(
            {
                "old": self.old,
                "new": self.new,
                "restarts": self.restarts,
                "steps": [{"pods": step.pods, "capacity": float(step.capacity)} for step in self.steps],
                "passes": [[as_json(action) for action in actions] for actions in self.passes],
            }
        )


def read_change(old: Path, new: Path) -> tuple[InferencePool, InferencePool]:
    """Read two versions of a pool from YAML files.

    Raises:
        UsageError: a file does not contain exactly one pool, or the API server would refuse the pool or the change.
    """
    before, after = _read_object(old, "OLD"), _read_object(new, "NEW")
    if found := refusals(before):
        raise _refused(f"OLD ({old}) is not a valid pool; pass the pool as the API server stores it", found, "old")
    namespace = _namespace(before) or _namespace(after)  # a manifest without one is for any namespace
    is_same = _identity(before, namespace) == _identity(after, namespace)
    if found := refusals(after, before if is_same else None):
        raise _refused(f"NEW ({new}) would be refused by the API server", found, "new")
    if not is_same:
        raise UsageError(
            f"{old} and {new} describe different pools, {_identity(before, namespace)} and "
            f"{_identity(after, namespace)}; pass two versions of the same pool",
            field="new",
        )
    for body in (before, after):
        body["metadata"] = {**body["metadata"], **({"namespace": namespace} if namespace else {})}
    old_pool, new_pool = (parse_pool(with_defaults(body, pool_schema())) for body in (before, after))
    return old_pool, new_pool


def _namespace(body: Json) -> str:
    return str((body.get("metadata") or {}).get("namespace") or "")


def _identity(body: Json, default_namespace: str) -> str:
    name = (body.get("metadata") or {}).get("name")
    return f"{_namespace(body) or default_namespace or 'default'}/{name}"


def _refused(summary: str, found: list[str], field: str) -> UsageError:
    return UsageError("\n".join([f"{summary}:", *(f"  {line}" for line in found)]), field=field)


def _read_object(path: Path, argument: str) -> Json:
    try:
        documents = list(yaml.load_all(path.read_bytes()[:_MAX_BYTES], Loader=_Manifests))
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"{argument} ({path}): {error}", field="pool") from error
    found = [d for d in documents if isinstance(d, dict) and d.get("kind") == "InferencePool"]
    if len(found) != 1:
        raise UsageError(
            f"{argument} ({path}) must contain exactly one object of kind InferencePool, not {len(found)}", field="pool"
        )
    version = found[0].get("apiVersion")
    if str(version).partition("/")[0] != names.API_VERSION.partition("/")[0]:
        raise UsageError(
            f"{argument} ({path}): apiVersion must be {names.API_VERSION}, not {version!r}; other groups have a kind "
            "InferencePool too",
            field="pool",
        )
    return found[0]


class _Manifests(yaml.SafeLoader):
    """Reads YAML as kubectl does: keys are text and stand once, and dates are text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for twice in (key for key in keys if keys.count(key) > 1):
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} stands twice", node.start_mark)
        return {str(key): value for key, value in super().construct_mapping(node, deep).items()}


_Manifests.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def preview(old: InferencePool, new: InferencePool, default_image: str) -> Preview:
    """Compute the steps and writes from `old`, completely rolled out, to `new`, if all pods become ready and all writes
    succeed.

    The optional kinds (PodMonitor, InferencePool of the inference extension) are assumed to be installed.
    """
    new = msgspec.structs.replace(new, keys=old.keys or new.keys)  # A file with the new spec has no status.
    before = revision_of(old, default_image)
    after = new.spec.rollout.rollback_to or revision_of(new, default_image)
    plain = msgspec.structs.replace(old.spec.rollout, rollback_to="", paused=False)
    settled = msgspec.structs.replace(old, spec=msgspec.structs.replace(old.spec, rollout=plain))
    cluster = SimulatedCluster(default_image)
    cluster.settle(settled, _MAX_STEPS)
    cluster.add_record(new, after)
    plans = cluster.settle(new, _MAX_STEPS)
    steps = [step for plan in plans if (step := _planned_step(plan)) is not None]
    return Preview(before, after, tuple(steps), tuple(plan.actions for plan in plans))


def _planned_step(plan: Plan) -> PlannedStep | None:
    """Return the rollout step of a pass; `None` if the pass does not change numbers of pods."""
    desired = {key: pods for key, pods in plan.step.desired.items() if pods}
    current = {(role.name, revision): pods for role in plan.roles for revision, pods in role.pods.items()}
    if plan.rollback is not None or desired == current:
        return None
    shrunk = [
        replace(
            role,
            revisions={
                revision: Count(pods, min(pods, role.of(revision).ready))
                for (name, revision), pods in desired.items()
                if name == role.name
            },
        )
        for role in plan.roles
    ]
    serving = [role for role in shrunk if role.is_leaving] or shrunk
    paired = [role for role in serving if role.name in PAIRED] or serving
    return PlannedStep(
        {role.name: {revision: c.desired for revision, c in sorted(role.revisions.items())} for role in shrunk},
        min(Fraction(1), capacity(paired)),
    )
