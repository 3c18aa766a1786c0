"""Leader election with a Lease of coordination.k8s.io, as pure functions of the observed lease.

As in client-go, a lease expires if it has not changed for `leaseDurationSeconds` by the candidate's own clock, so the
clocks of different machines need not agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.operator.pool import names
from kvferry.operator.pool.spec import Json


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Durations of leader election, in seconds."""

    duration: float = 15.0
    """Time without renewal after which a candidate may take the lease."""
    renew: float = 3.0
    """Period of renewals."""
    deadline: float = 10.0
    """Time without a successful renewal after which the leader stops; must be shorter than `duration`."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """The last observed change of a lease."""

    version: str
    since: float
    """Time when this version was first observed, by the local clock."""


def sighted(before: Sighting | None, version: str, now: float) -> Sighting:
    """Return the sighting to keep after the lease was read at `version`.

    Args:
        before: the last observed change of the lease; `None` if it was not read before.
        version: resourceVersion of the lease that was read.
        now: time in seconds, by the clock of `before`.
    """
    return before if before is not None and before.version == version else Sighting(version, now)


def may_take(lease: Mapping[str, Any] | None, me: str, seen: Sighting | None, now: float) -> bool:
    """Return whether `me` may take the lease because it is free, held by `me`, released or expired.

    Args:
        lease: the Lease object; `None` if it does not exist.
        me: identity of the candidate.
        seen: the last observed change of the lease; `None` if it was not read before.
        now: time in seconds, by the clock of `seen`.
    """
    if lease is None:
        return True
    spec = lease.get("spec") or {}
    holder = spec.get("holderIdentity")
    if not holder or holder == me:
        return True
    return seen is not None and now - seen.since > float(spec.get("leaseDurationSeconds") or 0)


def taken(
    lease: Mapping[str, Any] | None,
    me: str,
    times: LeaseTimes,
    stamp: str,
    *,
    name: str,
    namespace: str,
    watched: Sequence[str] = (),
) -> Json:
    """Return the lease with `me` as its holder. A change of the holder increments `leaseTransitions`.

    Args:
        lease: the Lease object that was read; `None` to create it.
        me: identity of the holder.
        times: durations of leader election.
        stamp: wall-clock time, RFC 3339 with microseconds.
        name: name of a new lease.
        namespace: namespace of a new lease.
        watched: namespaces whose pools `me` reconciles; empty for all. The lease shows them.
    """
    spec: Json = dict((lease or {}).get("spec") or {})
    changed = spec.get("holderIdentity") != me
    transitions = int(spec.get("leaseTransitions") or 0) + (1 if changed and lease is not None else 0)
    meta: Json = (lease or {}).get("metadata") or {"name": name, "namespace": namespace}
    annotations = {**(meta.get("annotations") or {}), names.ANNOTATION_NAMESPACES: ",".join(watched)}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {**meta, "annotations": annotations},
        "spec": {
            "holderIdentity": me,
            "leaseDurationSeconds": max(1, round(times.duration)),
            "acquireTime": stamp if changed else spec.get("acquireTime", stamp),
            "renewTime": stamp,
            "leaseTransitions": transitions,
        },
    }


def watched_by(lease: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the namespaces whose pools the holder of a lease reconciles; empty for all, or if it is not known."""
    shown = (lease["metadata"].get("annotations") or {}).get(names.ANNOTATION_NAMESPACES) or ""
    return tuple(shown.split(",")) if shown else ()


def released(lease: Mapping[str, Any], stamp: str) -> Json:
    """Return the lease without a holder, so that a candidate can take it immediately."""
    return {
        **lease,
        "spec": {**(lease.get("spec") or {}), "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": stamp},
    }
