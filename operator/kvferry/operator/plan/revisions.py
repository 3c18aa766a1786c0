"""Records of a pool's revisions: one ControllerRevision per revision.

A record contains the Deployments, not the spec: an upgraded operator that builds Deployments differently must not
restart pods, and a rollback must restore the exact Deployments.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvferry.operator.objects.pods import child
from kvferry.operator.pool import names
from kvferry.operator.pool.spec import InferencePool, Json


def record(pool: InferencePool, revision: str, number: int, deployments: Mapping[str, Json]) -> Json:
    """Build the ControllerRevision of a revision.

    Args:
        pool: the pool.
        revision: name of the revision, a digest of the pods' inputs.
        number: number of the record, by which records are ordered.
        deployments: the revision's Deployments, by role.
    """
    made = child(
        pool,
        "apps/v1",
        "ControllerRevision",
        names.revision_object(pool.name, revision),
        data={"deployments": {role: {"spec": made["spec"]} for role, made in deployments.items()}},
        revision=number,
    )
    made["metadata"]["labels"] |= {names.LABEL_REVISION: revision}
    return made


def recorded(pool: InferencePool, revision: str, found: Mapping[str, Any]) -> dict[str, Json]:
    """Read the Deployments from a record. Only their specs are read; names, labels and owner references are derived
    from the pool, so that a forged record cannot change other objects."""
    made = {}
    for role, kept in ((found.get("data") or {}).get("deployments") or {}).items():
        if role in names.WORKER_ROLES:
            name = names.deployment_name(pool.name, role, revision)
            made[role] = child(pool, "apps/v1", "Deployment", name, role, spec=kept["spec"])
            made[role]["metadata"]["labels"] |= {names.LABEL_REVISION: revision}
    return made


def next_number(found: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of the next record: the highest number plus one."""
    return max((int(item.get("revision") or 0) for item in found), default=0) + 1


def superfluous(found: Iterable[Mapping[str, Any]], needed: frozenset[str], limit: int) -> list[str]:
    """Return the names of records to delete, oldest first: all but the newest `limit` and the records of `needed`
    revisions."""
    spare = [item for item in found if item["metadata"]["labels"].get(names.LABEL_REVISION) not in needed]
    ordered = sorted(spare, key=lambda item: (int(item.get("revision") or 0), item["metadata"]["name"]))
    return [str(item["metadata"]["name"]) for item in ordered[: max(0, len(ordered) - limit)]]
