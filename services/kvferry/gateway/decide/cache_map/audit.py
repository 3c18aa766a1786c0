"""Compares a replica's map with the worker's own answer.

Digests in the feed show that the worker's reports were applied completely. An audit also shows that the index still
contains these blocks, and that the feed has not stalled: a separate call requests the worker's sequence number and
digest, whether it has names that were predicted recently, and a sample of its own names. Blocks that changed during the
audit are not compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvferry.gateway.decide.cache_map.block_index import BlockIndex
from kvferry.gateway.decide.cache_map.feed_events import Digest, NameSlice, keys_of
from kvferry.gateway.decide.cache_map.map_states import MapState
from kvferry.gateway.decide.cache_map.replica_map import ReplicaMap


class AuditOutcome(StrEnum):
    """Result of an audit."""

    WAIT = "wait"
    """The feed has not reached the worker's answer yet; compare again later."""
    MATCH = "match"
    MISMATCH = "mismatch"
    SKIPPED = "skipped"
    """The map was not exact, the worker restarted, or too many blocks changed."""


@dataclass(frozen=True, slots=True)
class AuditAnswer:
    """A worker's answer to an audit."""

    incarnation: str
    sequence: int
    digest: Digest
    held: Sequence[bool]
    """For each name in question, whether the worker has it."""
    sample: Sequence[bytes]
    """Names that the worker has."""


@dataclass(frozen=True, slots=True)
class Audit:
    """An audit in progress."""

    names: tuple[bytes, ...]
    """Names in question, all of which the map has."""
    sequence: int
    """Sequence of the map at the beginning."""
    incarnation: str


def begin_audit(replica: ReplicaMap, index: BlockIndex) -> Audit | None:
    """Begin an audit; `None` if the map is not exact.

    Args:
        replica: map of the worker to audit.
        index: the index with the blocks of the map.
    """
    if replica.state is not MapState.EXACT:
        return None
    sampled = dict.fromkeys(replica.samples)
    keys = keys_of(list(sampled))
    replica.touched = set()
    return Audit(
        tuple(name for name, key in zip(sampled, keys, strict=True) if index.holds(key, replica.bit)),
        replica.sequence,
        replica.incarnation,
    )


def compare(audit: Audit, answer: AuditAnswer, replica: ReplicaMap, index: BlockIndex) -> tuple[AuditOutcome, str]:
    """Compare the worker's answer with the map. Changes neither.

    Args:
        audit: the audit in progress.
        answer: the worker's answer to it.
        replica: the worker's map, at any event since the beginning of the audit.
        index: the index with the blocks of all replicas.

    Returns:
        The outcome, and for a mismatch its description.
    """
    touched = replica.touched
    if replica.state is not MapState.EXACT or touched is None or answer.incarnation != audit.incarnation:
        return AuditOutcome.SKIPPED, ""
    if answer.sequence < audit.sequence:
        return AuditOutcome.MISMATCH, f"the worker is at event {answer.sequence}, before event {audit.sequence}"
    if answer.sequence > replica.sequence:
        return AuditOutcome.WAIT, ""
    known = dict(replica.digests).get(answer.sequence)
    if known is not None and known != answer.digest:
        return AuditOutcome.MISMATCH, f"a different digest of event {answer.sequence}"
    try:
        sample = NameSlice.read(b"".join(answer.sample)).keys
    except ValueError as error:
        return AuditOutcome.MISMATCH, str(error)
    if len(answer.held) != len(audit.names):
        return AuditOutcome.MISMATCH, f"answers for {len(answer.held)} of {len(audit.names)} names"
    audited = keys_of(audit.names)
    phantoms = sum(not held and key not in touched for key, held in zip(audited, answer.held, strict=True))
    missing = sum(key not in touched and not index.holds(key, replica.bit) for key in sample)
    if phantoms or missing:
        return (
            AuditOutcome.MISMATCH,
            f"{phantoms} of {len(audited)} blocks not cached, {missing} of {len(sample)} missing",
        )
    return AuditOutcome.MATCH, ""
