"""What a tier is: a bounded place that keeps *storage objects* by name, and may lose any of them at any time.

    prompt blocks    [ b0 | b1 | b2 | b3 ][ b4 | b5 | b6 | b7 ][ b8 | b9 ...
    storage objects  |----- object 0 ----||----- object 1 ----|  (not full: not stored)
    its name         name of b3           name of b7

An object is a run of whole pages, side by side, `object_bytes` long; all objects of one worker have the same length.
It is named by its last block, whose name stands for the whole prefix (`core.hashing`), so equal names mean equal
bytes and an object never changes: a second store of a name is a no-op. Names are keyed by tenant, model and layout.

A tier answers a lookup in three ways, because between yes and no there is a third truth: somebody is writing it.
Whatever goes wrong afterwards (evicted in between, cut, flipped, too slow) is a `TierError`; the caller computes the
tokens instead, so a tier can cost time and never a wrong token.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from kvferry.kv.tiering import ObjectKey as ObjectKey


class Presence(StrEnum):
    """A lookup's answer for one object."""

    YES = "yes"
    """Stored whole and readable now; a hint, since it may be evicted before the read."""
    NO = "no"
    NOT_YET = "not_yet"
    """On its way here; asking again soon is worth it."""


class TierError(Exception):
    """This object did not come from, or go to, this tier. The message says why and shows no key and no secret."""


class TierMiss(TierError):
    """The object is not there (any more). Nothing is wrong with the tier."""


class Tier(Protocol):
    """One place. Called from several threads at once; every call ends within its `timeout` (seconds)."""

    @property
    def name(self) -> str:
        """`dram`, `disk`, `redis`: in metrics and decisions."""
        ...

    def lookup(self, keys: Sequence[ObjectKey], timeout: float) -> list[Presence]:
        """Where each object stands, in order. Answers NO for all rather than raise when the tier is out of order."""
        ...

    def load(self, key: ObjectKey, into: Sequence[memoryview], timeout: float) -> None:
        """Read one object into the given buffers, one after the other; together they are `object_bytes` long.

        When it returns, content and digest were verified. When it returns or raises, nobody writes `into` any more.

        Raises:
            TierMiss: it is not there.
            TierError: damaged, cut, too slow, or the tier is out of order; the buffers' content is then undefined.
        """
        ...

    def store(self, key: ObjectKey, parts: Sequence[memoryview], timeout: float) -> bool:
        """Keep one object, the parts one after the other; whether it was written (`False`: it was there already, or
        the tier declined it: full of what is in use, over quota, not asked for often enough).

        Readers see it whole or not at all. When it returns or raises, nobody reads `parts` any more.

        Raises:
            TierError: it could not be written; nothing is left of it.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes it holds, as well as it knows."""
        ...

    def close(self) -> None:
        """End connections and files; what a persistent tier keeps stays. Idempotent."""
        ...
