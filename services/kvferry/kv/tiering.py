"""The interface between an engine and its tiers: the words that pass, told as the life of one prompt.

    engine   KvTiers.ask          on arrival: which storage objects of this prompt does any tier have?
    tiers    TierAnswer           at once if memory knows it all, else a little later; the prompt waits for it
    engine   PriceBook.decide     how many of them to load; the rest is computed
    engine   KvTiers.prefetch     they begin to move towards memory while the prompt queues
    engine   KvTiers.start        pages are held: fill them (a `KvLoader`, as for a peer's offer)
    tiers    LoadOutcome          how far it came; what is missing is computed
    engine   KvTiers.store        blocks were computed and are full: copy them, the pages are held until
    tiers    StoreDone            nobody reads them any more

The engine's thread calls and never waits; everything slow happens on the tiers' own threads. See `kv.tiers.tier` for
what a storage object is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.core.ids import BlockHash, BlockId, RequestId
from kvferry.kv.connector import KvLoader


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """Names one storage object."""

    name: BlockHash
    """Of the object's last block."""
    tenant: str
    """Whose it is: for quotas and encryption keys. The name is the tenant's own already."""


@dataclass(frozen=True, slots=True)
class TierAnswer:
    """Which of the objects asked for are there: the longest run from the first on."""

    request_id: RequestId
    sources: tuple[str, ...]
    """The tier of each object of the run."""


@dataclass(frozen=True, slots=True)
class StoreDone:
    """The pages of a store are read; their holder may let go. Comes once for each store."""

    job: int


@dataclass(frozen=True, slots=True)
class TierSource:
    """What a load needs beside its pages."""

    first_object: int
    """Index of the first key's object in the prompt, counted in objects."""
    keys: tuple[ObjectKey, ...]
    sources: tuple[str, ...]
    """Where each object was when asked for."""
    seconds: float
    """By then computing would have been the better way: the load ends, with what it has."""


class KvTiers(KvLoader, Protocol):
    """All tiers of one worker. Never blocks."""

    @property
    def object_blocks(self) -> int:
        """Blocks in a storage object."""
        ...

    @property
    def held_share(self) -> float:
        """Share of the pages that may be held for stores at a time; what comes on top is not stored."""
        ...

    def ask(self, request_id: RequestId, keys: Sequence[ObjectKey]) -> TierAnswer | None:
        """What is there; `None`: not known yet, the answer will come as a message."""
        ...

    def prefetch(self, request_id: RequestId, source: TierSource) -> None:
        """Begin to bring these closer. Cancelled with the request."""
        ...

    def wants(self, key: ObjectKey) -> bool:
        """Whether a store of this object would do anything."""
        ...

    def store(self, job: int, key: ObjectKey, pages: Sequence[BlockId]) -> None:
        """Keep one object; the caller holds the pages until `StoreDone`."""
        ...
