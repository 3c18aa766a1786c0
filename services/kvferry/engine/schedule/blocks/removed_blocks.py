"""Record of the blocks that the prefix index has removed: names, time and kind of the removal, in a fixed memory.

The record consists of two hash tables of equal size with open addressing. Names are added to the young one. When it has
`capacity` names, it becomes the old one, and an empty one takes its place. The record thus knows each of the last
`capacity` names and at most twice as many, in 48 bytes for each of them, and an addition never searches for the oldest
name.

A name is represented by a hash of 64 bits: among a million names, a lookup of another
name finds one with probability 5e-14. A wrong answer costs a wrong statistic.
"""

from array import array

from kvferry.core.ids import BlockHash

DEFAULT_CAPACITY = 4096
MAX_CAPACITY = 1 << 18
_BLOCKS_REMEMBERED = 4
"""Names in the record for each page of the pool."""
_KEY_BYTES, _STAMP_BYTES = 8, 4
_KEY_BITS = (1 << 64) - 1
UNKNOWN = -1
"""Stamp of a block whose removal is not known. Other stamps have the seconds, and in their lowest bit whether the block
was dropped."""


def capacity_for(num_blocks: int) -> int:
    """Return the capacity of the record of a pool with this number of pages: four times as many, within bounds."""
    return min(max(DEFAULT_CAPACITY, _BLOCKS_REMEMBERED * num_blocks), MAX_CAPACITY)


class RemovedBlocks:
    """Names of the blocks that were removed last. Owned by the engine's thread."""

    __slots__ = (
        "_capacity", "_count", "_keys", "_mask", "_old_count", "_old_keys", "_old_stamps", "_seconds", "_stamps",
        "_start",
    )  # fmt: skip

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        """
        Args:
            capacity: minimum number of names that are remembered; rounded up to a power of two.

        Raises:
            ValueError: `capacity` is not positive.
        """
        if capacity < 1:
            raise ValueError(f"capacity must be positive, not {capacity}")
        self._capacity = 1 << (capacity - 1).bit_length()
        self._mask = 2 * self._capacity - 1
        self._keys, self._stamps = self._empty()
        self._old_keys, self._old_stamps = self._empty()
        self._count = self._old_count = 0
        self._start: float | None = None
        self._seconds = 0

    def at(self, now: float) -> None:
        """Set the time of the removals that follow.

        Args:
            now: monotonic time in seconds.
        """
        if self._start is None:
            self._start = now
        self._seconds = int(now - self._start)

    def add(self, name: BlockHash, *, is_dropped: bool = False) -> None:
        """Record a removal; a later one of the same block replaces it.

        Args:
            name: name of the block.
            is_dropped: whether the block was removed although its pages were not needed.
        """
        if self._count == self._capacity:
            self._old_keys, self._old_stamps, self._old_count = self._keys, self._stamps, self._count
            self._keys, self._stamps = self._empty()
            self._count = 0
        key, keys, mask = hash(name) & _KEY_BITS or 1, self._keys, self._mask
        slot = key & mask
        while (found := keys[slot]) != key:
            if not found:
                keys[slot] = key
                self._count += 1
                break
            slot = (slot + 1) & mask
        self._stamps[slot] = self._seconds << 1 | is_dropped

    def stamp(self, name: BlockHash) -> int:
        """Return the time and kind of a block's last removal, for `age` and `is_dropped`; `UNKNOWN` if there is none.

        Args:
            name: name of the block.
        """
        key, mask = hash(name) & _KEY_BITS or 1, self._mask
        for keys, stamps in ((self._keys, self._stamps), (self._old_keys, self._old_stamps)):
            slot = key & mask
            while found := keys[slot]:
                if found == key:
                    return stamps[slot]
                slot = (slot + 1) & mask
        return UNKNOWN

    def age(self, stamp: int) -> float:
        """Return the whole seconds since a removal.

        Args:
            stamp: a result of `stamp`, not `UNKNOWN`.
        """
        return float(self._seconds - (stamp >> 1))

    @staticmethod
    def is_dropped(stamp: int) -> bool:
        """Return whether a block was dropped, and not evicted.

        Args:
            stamp: a result of `stamp`, not `UNKNOWN`.
        """
        return bool(stamp & 1)

    def __len__(self) -> int:
        """Return the number of entries; a name that was removed twice may have two."""
        return self._count + self._old_count

    @property
    def num_bytes(self) -> int:
        """Memory of the tables in bytes."""
        tables = (self._keys, self._stamps, self._old_keys, self._old_stamps)
        return sum(len(table) * table.itemsize for table in tables)

    def _empty(self) -> "tuple[array[int], array[int]]":
        size = self._mask + 1
        return array("Q", bytes(_KEY_BYTES * size)), array("I", bytes(_STAMP_BYTES * size))
