"""What was run, so that it can be run again: one ControllerRevision for each revision of a pool.

It holds the Deployments as they were made, not the spec: an operator that would make them otherwise today must not
restart pods, and a rollback must bring back exactly what ran.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvferry.operator import names
from kvferry.operator.pods import child
from kvferry.operator.spec import Json, Pool


def record(pool: Pool, revision: str, number: int, deployments: Mapping[str, Json]) -> Json:
    """The object that remembers `deployments`, by role, as `revision`; `number` orders them by time."""
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


def recorded(pool: Pool, revision: str, found: Mapping[str, Any]) -> dict[str, Json]:
    """The Deployments that a record remembers. Only what they are made to be is taken from it: what they are called and
    whose they are is not for whoever may write records to say."""
    made = {}
    for role, kept in ((found.get("data") or {}).get("deployments") or {}).items():
        if role in names.WORKER_ROLES:
            name = names.deployment_name(pool.name, role, revision)
            made[role] = child(pool, "apps/v1", "Deployment", name, role, spec=kept["spec"])
            made[role]["metadata"]["labels"] |= {names.LABEL_REVISION: revision}
    return made


def next_number(found: Iterable[Mapping[str, Any]]) -> int:
    """After the highest so far."""
    return max((int(item.get("revision") or 0) for item in found), default=0) + 1


def superfluous(found: Iterable[Mapping[str, Any]], needed: frozenset[str], limit: int) -> list[str]:
    """Names of the records beyond the newest `limit` that no Deployment and no rollback needs, oldest first."""
    spare = [item for item in found if item["metadata"]["labels"].get(names.LABEL_REVISION) not in needed]
    ordered = sorted(spare, key=lambda item: (int(item.get("revision") or 0), item["metadata"]["name"]))
    return [str(item["metadata"]["name"]) for item in ordered[: max(0, len(ordered) - limit)]]
