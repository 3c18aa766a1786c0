"""Interface of a KV tier: a bounded store of *storage objects* by name, which may drop any object at any time.

    prompt blocks    [ b0 | b1 | b2 | b3 ][ b4 | b5 | b6 | b7 ][ b8 | b9 ...
    storage objects  |----- object 0 ----||----- object 1 ----|  (not full, not stored)
    object's name    name of b3           name of b7

An object is a contiguous run of whole pages, `object_bytes` long; all objects of a worker have the same length. Its
name is the hash of its last block, which covers the whole prefix (`core.hashing`), so equal names mean equal bytes. An
object never changes, and a second store under its name is a no-op. Names are keyed by tenant, model and layout.

A lookup has three results: stored, missing, and being written. Any later failure (evicted in between, truncated,
corrupted, too slow) is a `TierError`; the caller computes the tokens instead, so a tier can cost time but never produce
a wrong token.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from kvferry.kv.interface.tiering import ObjectKey as ObjectKey


class Presence(StrEnum):
    """Result of a lookup for one object."""

    YES = "yes"
    """Completely stored and readable; only a hint, since the object may be evicted before it is read."""
    NO = "no"
    NOT_YET = "not_yet"
    """Being written; a later lookup may return YES."""


class TierError(Exception):
    """An object could not be loaded or stored. The message states the reason, without any key or secret."""


class TierMiss(TierError):
    """The object is not stored in the tier or was evicted; the tier itself works."""


class Tier(Protocol):
    """A KV tier. Thread-safe; every call returns within its `timeout`, in seconds."""

    @property
    def name(self) -> str:
        """Name of the tier in metrics and decisions: `dram`, `disk` or `redis`."""
        ...

    def lookup(self, keys: Sequence[ObjectKey], timeout: float) -> list[Presence]:
        """Return the presence of each object, in order. A failed tier returns NO for all objects instead of raising an
        error.

        Args:
            keys: the objects.
            timeout: time limit in seconds.
        """
        ...

    def load(self, key: ObjectKey, into: Sequence[memoryview], timeout: float) -> None:
        """Read one object into the given buffers, in order; their total length is `object_bytes`.

        When the call returns, the content is verified. After it returns or raises, the tier no longer writes to `into`.

        Args:
            key: key of the object.
            into: writable buffers with a total length of `object_bytes`.
            timeout: time limit in seconds.

        Raises:
            TierMiss: the object is not stored.
            TierError: the object is damaged or truncated, the time-out passed, or the tier failed; the content of the
                buffers is undefined.
        """
        ...

    def store(self, key: ObjectKey, parts: Sequence[memoryview], timeout: float) -> bool:
        """Store one object, the concatenation of `parts`; return whether it was written. It is not written if it was
        already stored, or if the tier rejected it: all space is in use, the quota is exhausted, or it was not requested
        often enough.

        Readers find either the complete object or no object. After the call returns or raises, the tier no longer reads
        `parts`.

        Args:
            key: key of the object.
            parts: content of the object, with a total length of `object_bytes`.
            timeout: time limit in seconds.

        Raises:
            TierError: the object could not be written; no part of it remains.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Number of stored bytes, as far as this process can determine it."""
        ...

    def close(self) -> None:
        """Close connections and files; objects of a persistent tier remain. Idempotent."""
        ...
