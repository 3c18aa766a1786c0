"""Reads of the ControllerRevisions that a plan needs: the target revision's and the running revisions'."""

from collections.abc import Mapping

from kvferry.operator.api import KubeApi
from kvferry.operator.plan.context import revisions_to_read
from kvferry.operator.plan.revisions import next_number, recorded
from kvferry.operator.pool import names
from kvferry.operator.pool.facts import PoolFacts
from kvferry.operator.pool.ownership import owner_of
from kvferry.operator.pool.spec import InferencePool, Json

Records = Mapping[str, Mapping[str, Json]]
"""Recorded Deployments, by revision and role."""


def read_records(
    api: KubeApi, pool: InferencePool, facts: PoolFacts, known: Records, default_image: str
) -> tuple[dict[str, Mapping[str, Json]], int]:
    """Return the known records, the further records that the plan needs, and the number of the next ControllerRevision.

    The number is determined (by listing the records) only if a record has to be created. Records never change, so known
    records are not read again.

    Args:
        api: client for reads of ControllerRevisions.
        pool: the pool.
        facts: observed objects of the pool.
        known: records that were read or written before, by revision.
        default_image: image for pools without `spec.image`.

    Raises:
        KvferryError: the records cannot be read.
    """
    records = dict(known)
    needed = revisions_to_read(pool, facts, default_image)
    for revision in needed:
        if revision not in records:
            name = names.revision_object(pool.name, revision)
            found = api.get("apps/v1", "ControllerRevision", pool.namespace, name)
            if found is not None and owner_of(found) == pool.uid:
                records[revision] = recorded(pool, revision, found)
    is_lost = any(
        kept and facts.is_lost("ControllerRevision", names.revision_object(pool.name, revision))
        for revision, kept in records.items()
    )
    if not is_lost and (pool.spec.rollout.rollback_to or records.get(needed[0])):
        return records, 0
    listed = api.list("apps/v1", "ControllerRevision", pool.namespace, {names.LABEL_POOL: pool.name})
    return records, next_number(listed)
