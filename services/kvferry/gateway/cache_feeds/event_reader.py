"""Reads messages of `KvEvents` into values of the cache map."""

from collections.abc import Sequence
from typing import overload

from kvferry.gateway.cache_map.audit import AuditAnswer
from kvferry.gateway.cache_map.feed_events import NAME_BYTES, Delta, Digest, SnapshotPart
from kvferry.v1 import kv_events_pb2

_MAX_INCARNATION_CHARS = 64


def event_from_wire(event: kv_events_pb2.KvEvent) -> SnapshotPart | Delta:
    """Convert an event of a feed. A digest of the wrong size becomes one that matches no map."""
    incarnation = event.incarnation[:_MAX_INCARNATION_CHARS]
    digest = _digest(event.digest)
    if event.HasField("snapshot"):
        snapshot = event.snapshot
        names = _BlockNames(snapshot.blocks)
        return SnapshotPart(incarnation, event.sequence, names, snapshot.last, digest, snapshot.check_name)
    delta = event.delta
    return Delta(incarnation, event.sequence, delta.removed, _BlockNames(delta.stored), digest)


def audit_from_wire(answer: kv_events_pb2.ProbeResponse) -> AuditAnswer:
    """Convert a worker's answer to an audit."""
    return AuditAnswer(
        answer.incarnation[:_MAX_INCARNATION_CHARS],
        answer.sequence,
        _digest(answer.digest),
        answer.held,
        answer.samples,
    )


class _BlockNames(Sequence[bytes]):
    """Block names, converted when a slice of them is used, since a message may have 100,000 blocks."""

    def __init__(self, blocks: Sequence[kv_events_pb2.CachedBlock]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, int):
            return self._blocks[index].name
        return [block.name for block in self._blocks[index]]


def _digest(digest: kv_events_pb2.KvDigest) -> Digest:
    return Digest(digest.count, int.from_bytes(digest.xor, "big") if len(digest.xor) == NAME_BYTES else -1)
