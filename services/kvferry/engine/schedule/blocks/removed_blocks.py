"""Record of the blocks that the prefix index has removed: names, time and kind of the removal, in a fixed memory.

The record consists of two hash tables of equal size with open addressing. Names are added to the young one. When it has
`capacity` names, the old one is emptied and the tables change places. The record thus knows each of the last `capacity`
names and at most twice as many, in 48 bytes for each of them, and an addition never searches for the oldest name.

A name is represented by its first 64 bits, which are uniformly distributed: among a million names, a lookup of another
name finds one with probability 5e-14. A wrong answer costs a wrong statistic.
"""

from array import array

from kvferry.core.ids import BlockHash

DEFAULT_CAPACITY = 4096
MAX_CAPACITY = 1 << 18
_BLOCKS_REMEMBERED = 4
"""Names in the record for each page of the pool."""
_KEY_BYTES, _STAMP_BYTES = 8, 4
_DROPPED = 1
"""Lowest bit of the stamp of a dropped block; the other bits are seconds."""


def capacity_for(num_blocks: int) -> int:
    """Return the capacity of the record of a pool with this number of pages: four times as many, within bounds."""
    return min(max(DEFAULT_CAPACITY, _BLOCKS_REMEMBERED * num_blocks), MAX_CAPACITY)


class _Table:
    """A hash table with open addressing and without removals, at most half full."""

    __slots__ = ("count", "keys", "mask", "stamps")

    def __init__(self, num_slots: int) -> None:
        self.mask = num_slots - 1
        self.keys, self.stamps = array("Q"), array("I")
        self.clear()

    def clear(self) -> None:
        size = self.mask + 1
        self.keys = array("Q", bytes(_KEY_BYTES * size))
        self.stamps = array("I", bytes(_STAMP_BYTES * size))
        self.count = 0

    def slot(self, key: int) -> int:
        """Return the slot of a key, or the empty slot where it belongs."""
        keys, mask = self.keys, self.mask
        slot = key & mask
        while (found := keys[slot]) and found != key:
            slot = (slot + 1) & mask
        return slot


class RemovedBlocks:
    """Names of the blocks that were removed last. Owned by the engine's thread."""

    __slots__ = ("_capacity", "_old", "_seconds", "_start", "_young")

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
        num_slots = 2 * self._capacity
        self._young, self._old = _Table(num_slots), _Table(num_slots)
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
        young = self._young
        if young.count >= self._capacity:
            young, self._old = self._old, young
            young.clear()
            self._young = young
        slot = young.slot(_key(name))
        if not young.keys[slot]:
            young.keys[slot] = _key(name)
            young.count += 1
        young.stamps[slot] = self._seconds << 1 | (_DROPPED if is_dropped else 0)

    def find(self, name: BlockHash) -> tuple[bool, float] | None:
        """Return whether a block was dropped, and the seconds since its last removal; `None` if no removal is known.

        Args:
            name: name of the block.
        """
        key = _key(name)
        for table in (self._young, self._old):
            slot = table.slot(key)
            if table.keys[slot]:
                stamp = table.stamps[slot]
                return bool(stamp & _DROPPED), float(self._seconds - (stamp >> 1))
        return None

    def __len__(self) -> int:
        """Return the number of entries; a name that was removed twice may have two."""
        return self._young.count + self._old.count

    @property
    def num_bytes(self) -> int:
        """Memory of the tables in bytes."""
        tables = (self._young, self._old)
        return sum(len(t.keys) * t.keys.itemsize + len(t.stamps) * t.stamps.itemsize for t in tables)


def _key(name: BlockHash) -> int:
    """Return the first 64 bits of a name; 0 stands for an empty slot."""
    return int.from_bytes(name[:_KEY_BYTES], "little") or 1
