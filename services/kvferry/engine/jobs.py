"""What a scheduler hands out beside steps: KV to load, KV to keep, KV to leave to somebody else."""

from dataclasses import dataclass

from kvferry.core.ids import BlockHash, BlockId, RequestId
from kvferry.engine.sequence import RemoteKv
from kvferry.kv.tiering import ObjectKey


@dataclass(frozen=True, slots=True)
class LoadJob:
    """KV to fetch from a peer into pages that are already held. Positions, not counts, say what goes where:

    prompt      [ b0 | b1 | b2 | b3 ]     covered by the peer's offer
    local hit   [ b0 | b1 ]
    fetched               [ b2 | b3 ]     first_block = 2; targets are this sequence's pages 2 and 3
    """

    request_id: RequestId
    remote: RemoteKv
    """Where from; positions below its `num_tokens` are good once the job is done."""
    first_block: int
    targets: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Full, computed blocks that make one storage object; the pages are held by nobody but their table yet."""

    key: ObjectKey
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """Further full blocks of a prompt that is still being computed; they follow on the ones told before."""

    request_id: RequestId
    blocks: tuple[BlockId, ...]
    epochs: tuple[int, ...]
    names: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Export:
    """Pages that a finished sequence leaves to an offer, each with the reference it had."""

    blocks: tuple[BlockId, ...]
    epochs: tuple[int, ...]
    num_tokens: int
