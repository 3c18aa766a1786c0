"""Interface between an engine and its KV tiers: calls and messages, in the order in which a prompt uses them.

    engine   KvTiers.ask          on arrival: look up which storage objects of this prompt are in any tier
    tiers    TierAnswer           immediately if indexes in memory suffice, otherwise later; the prompt waits for it
    engine   PriceBook.decide     how many of the objects to load; the rest is computed
    engine   KvTiers.prefetch     start to read them into host memory while the prompt queues
    engine   KvTiers.start        load them into allocated pages (a `KvLoader`, as for a peer's offer)
    tiers    LoadOutcome          the blocks that were loaded; missing blocks are computed
    engine   KvTiers.store        computed blocks are full: copy them; the engine holds the pages until
    tiers    StoreDone            the tiers have read them

The engine's thread makes these calls and never blocks; slow operations run on the tiers' threads.
`kv.tiers.interface.tier` defines a storage object.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.core.ids import BlockHash, BlockId, RequestId
from kvferry.kv.interface.connector import KvLoader, LoaderMessage


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """Key of one storage object."""

    name: BlockHash
    """Hash of the object's last block."""
    tenant: str
    """Tenant, for quotas and encryption keys; `name` is already specific to the tenant."""


@dataclass(frozen=True, slots=True)
class TierAnswer:
    """Result of a lookup: the longest leading run of the requested objects that are stored in tiers."""

    request_id: RequestId
    sources: tuple[str, ...]
    """Tier of each object of the run."""


@dataclass(frozen=True, slots=True)
class StoreDone:
    """Message: the tiers have read the pages of a store, and the engine may free them. Sent once for each store."""

    job: int


KvMessage = LoaderMessage | TierAnswer | StoreDone
"""Messages of loaders and tiers to an engine."""
KvListener = Callable[[KvMessage], None]
"""Listener for messages of tiers. Called on a tier's thread; must only enqueue the message."""


@dataclass(frozen=True, slots=True)
class TierSource:
    """Source of a load from tiers."""

    first_object: int
    """Index of the first key's storage object among the prompt's storage objects."""
    keys: tuple[ObjectKey, ...]
    sources: tuple[str, ...]
    """Tier of each object at the time of the lookup."""
    seconds: float
    """Time limit of the load in seconds, derived from the time to compute the tokens; when it passes, the load ends
    with the blocks loaded so far."""


class KvTiers(KvLoader, Protocol):
    """All tiers of one worker. No call blocks."""

    @property
    def object_blocks(self) -> int:
        """Number of blocks per storage object."""
        ...

    @property
    def held_share(self) -> float:
        """Maximum share of the engine's pages that stores may hold; above it, blocks are not stored."""
        ...

    def ask(self, request_id: RequestId, keys: Sequence[ObjectKey]) -> TierAnswer | None:
        """Look up objects; return `None` if the answer is not known yet and follows as a message.

        Args:
            request_id: id of the request that waits.
            keys: the objects, in order of their blocks.
        """
        ...

    def prefetch(self, request_id: RequestId, source: TierSource) -> None:
        """Start reading the source's objects into host memory; `cancel` of the request stops this."""
        ...

    def accepts(self, key: ObjectKey) -> bool:
        """Return whether any tier would store this object."""
        ...

    def store(self, job: int, key: ObjectKey, pages: Sequence[BlockId]) -> None:
        """Store one object; the caller must hold the pages until `StoreDone`.

        Args:
            job: number of the job, which `StoreDone` repeats.
            key: key of the object.
            pages: pages of the object, in order.
        """
        ...
