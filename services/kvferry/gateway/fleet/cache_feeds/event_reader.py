"""Reads messages of `KvEvents` into values of the cache map."""

from kvferry.gateway.decide.cache_map.audit import AuditAnswer
from kvferry.gateway.decide.cache_map.feed_events import NAME_BYTES, CacheDelta, Digest, SnapshotPart
from kvferry.v1 import kv_events_pb2

_MAX_INCARNATION_CHARS = 64


def event_from_wire(event: kv_events_pb2.KvEvent) -> SnapshotPart | CacheDelta:
    """Convert an event of a feed. A digest of the wrong size becomes one that matches no map."""
    incarnation = event.incarnation[:_MAX_INCARNATION_CHARS]
    digest = _digest(event.digest)
    if event.HasField("snapshot"):
        snapshot = event.snapshot
        names, check_name = snapshot.blocks.names, snapshot.check_name
        return SnapshotPart(incarnation, event.sequence, names, snapshot.last, digest, check_name)
    delta = event.delta
    return CacheDelta(incarnation, event.sequence, delta.removed, delta.stored.names, digest)


def audit_from_wire(answer: kv_events_pb2.ProbeResponse) -> AuditAnswer:
    """Convert a worker's answer to an audit."""
    return AuditAnswer(
        answer.incarnation[:_MAX_INCARNATION_CHARS],
        answer.sequence,
        _digest(answer.digest),
        answer.held,
        answer.samples,
    )


def _digest(digest: kv_events_pb2.KvDigest) -> Digest:
    return Digest(digest.count, int.from_bytes(digest.xor, "big") if len(digest.xor) == NAME_BYTES else -1)
