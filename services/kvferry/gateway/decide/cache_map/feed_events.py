"""Events of a worker's cache feed as values, and digests of sets of block names."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

NAME_BYTES = 32
KEY_BITS = 60
"""Number of leading bits of a name that the map stores. Integers up to 60 bits take 32 bytes in CPython, and larger
ones 48. Two of 10 million names collide with a probability of 4e-5."""
_NAME_BITS = 8 * NAME_BYTES
_LEADING = struct.Struct(f">Q{NAME_BYTES - 8}x")


@dataclass(frozen=True, slots=True)
class Digest:
    """Digest of a set of names: their number, and the XOR of the names as big-endian integers."""

    count: int
    xor: int


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """A part of a snapshot; all parts have the same incarnation, sequence and digest."""

    incarnation: str
    sequence: int
    names: bytes
    """Names of the blocks, concatenated."""
    is_last: bool
    digest: Digest
    """Digest of the whole cache."""
    check_name: bytes = b""
    """The worker's name for a known block, to detect a different tenant key; empty if the worker does not send it."""


@dataclass(slots=True)  # not frozen, which would double the time to create one
class CacheDelta:
    """The changes of one step; removals come first."""

    incarnation: str
    sequence: int
    removed: bytes
    """Names of the removed blocks, concatenated."""
    stored: bytes
    """Names of the stored blocks, concatenated."""
    digest: Digest
    """Digest of the cache after the change."""


@dataclass(slots=True)  # not frozen, like `CacheDelta`
class NameSlice:
    """At most one slice of the names of an event: their keys in the index, and the XOR of the complete names."""

    keys: list[int]
    xor: int

    @classmethod
    def read(cls, joined: bytes) -> "NameSlice":
        """Convert concatenated names.

        Raises:
            ValueError: the length is not a multiple of 32.
        """
        if len(joined) % NAME_BYTES:
            raise ValueError(f"names have {len(joined)} bytes, which must be a multiple of {NAME_BYTES}")
        return cls(_keys(joined), xor_of(joined))


def keys_of(names: Sequence[bytes]) -> list[int]:
    """Return the keys of names of 32 bytes each."""
    return _keys(b"".join(names))


def _keys(joined: bytes) -> list[int]:
    shift = 64 - KEY_BITS
    return [leading >> shift for (leading,) in _LEADING.iter_unpack(joined)]


def num_names(joined: bytes) -> int:
    """Return the number of concatenated names; an incomplete one counts."""
    return -(-len(joined) // NAME_BYTES)


def slices(joined: bytes, size: int) -> Iterator[bytes]:
    """Yield concatenated names in slices of at most `size` names.

    Args:
        joined: block names of `NAME_BYTES` bytes each, one after another.
        size: maximum number of names in a slice.
    """
    for start in range(0, len(joined), size * NAME_BYTES):
        yield joined[start : start + size * NAME_BYTES]


def xor_of(joined: bytes) -> int:
    """Return the XOR of concatenated names. Folds one large integer, which takes a third of the time of a loop over the
    names."""
    folded, count = int.from_bytes(joined, "big"), num_names(joined)
    while count > 1:
        count = (count + 1) // 2
        bits = count * _NAME_BITS
        folded = (folded >> bits) ^ (folded & ((1 << bits) - 1))
    return folded
