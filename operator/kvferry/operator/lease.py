"""Who leads, by a Lease of coordination.k8s.io: the decision on what is read, as a pure function.

The rule of client-go's leader election: a holder is believed to be alive until its lease has not changed for
`leaseDurationSeconds` *by our own clock*, so that clocks of different machines need not agree.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.operator.spec import Json


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Seconds."""

    duration: float = 15.0
    """A silent leader is replaced after so long."""
    renew: float = 3.0
    """Between two writes of the leader."""
    deadline: float = 10.0
    """A leader that could not write for so long stops, well before another begins."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A lease as it was seen to change."""

    version: str
    since: float
    """When it was first seen so, by our clock."""


def sighted(before: Sighting | None, version: str, now: float) -> Sighting:
    """The sighting after reading the lease at `version`."""
    return before if before is not None and before.version == version else Sighting(version, now)


def may_take(lease: Mapping[str, Any] | None, me: str, seen: Sighting | None, now: float) -> bool:
    """Whether `me` may write itself into the lease: it is free, ours, given back, or its holder has been silent."""
    if lease is None:
        return True
    spec = lease.get("spec") or {}
    holder = spec.get("holderIdentity")
    if not holder or holder == me:
        return True
    return seen is not None and now - seen.since > float(spec.get("leaseDurationSeconds") or 0)


def taken(
    lease: Mapping[str, Any] | None, me: str, times: LeaseTimes, stamp: str, *, name: str, namespace: str
) -> Json:
    """The lease with `me` as its holder; a change of holder counts as a transition."""
    spec: Json = dict((lease or {}).get("spec") or {})
    changed = spec.get("holderIdentity") != me
    transitions = int(spec.get("leaseTransitions") or 0) + (1 if changed and lease is not None else 0)
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": (lease or {}).get("metadata") or {"name": name, "namespace": namespace},
        "spec": {
            "holderIdentity": me,
            "leaseDurationSeconds": max(1, round(times.duration)),
            "acquireTime": stamp if changed else spec.get("acquireTime", stamp),
            "renewTime": stamp,
            "leaseTransitions": transitions,
        },
    }


def given_back(lease: Mapping[str, Any], stamp: str) -> Json:
    """The lease free for the next one at once."""
    return {
        **lease,
        "spec": {**(lease.get("spec") or {}), "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": stamp},
    }
