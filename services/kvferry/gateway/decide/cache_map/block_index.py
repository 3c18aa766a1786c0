"""Index from block names to the sets of replicas that have the blocks, one lookup for the whole fleet.

A set of replicas is an integer with a bit per slot; equal integers are shared between entries. The index consists of
1,024 dictionaries, because a growing dictionary is copied as a whole, which would stop the event loop for a second at
10 million blocks. For the same reason, the bits of a dropped replica are not cleared at once: its slot stays reserved
until `sweep` has passed over all dictionaries.

Blocks of prompts that the gateway has dispatched are kept with the time of dispatch. They serve two purposes. For a
short time they count as present on a replica with an exact map, until the feed reports them (optimistic insertion), so
that requests with the same new prefix go to the same replica. For a longer time they replace the map of a replica whose
cache is unknown.
"""

import math
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from kvferry.gateway.decide.cache_map.feed_events import KEY_BITS

MAX_SLOTS = 512
_SHARD_BITS = 10
_SHIFT = KEY_BITS - _SHARD_BITS
_ENTRY_BYTES = 32
"""Size in bytes of a key."""
_MAX_SHARED_SETS = 1 << 16


class BlockIndex:
    """Map from the leading bits of names to sets of slots."""

    def __init__(self, max_slots: int = MAX_SLOTS) -> None:
        """
        Args:
            max_slots: maximum number of slots.
        """
        # Shards are chosen by the highest bits of a key, because dictionaries choose positions by the lowest bits.
        self._shards: list[dict[int, int]] = [{} for _ in range(1 << _SHARD_BITS)]
        self._sets: dict[int, int] = {}
        self._extra: dict[tuple[int, int], int] = {}
        """Number of additional names of a slot with equal leading bits, by (key, bit)."""
        self._free = list(range(max_slots - 1, -1, -1))
        self._dead = 0
        self.exact = 0
        """The slots whose maps are exact."""
        self.num_blocks = 0
        """Number of blocks of all slots in use, counted once for each slot."""
        self.num_dead = 0
        """Number of blocks of dropped slots that have not been swept; an upper bound."""
        self.num_collisions = 0
        """Number of names added so far whose leading bits equal those of another name of the same slot."""

    def take_slot(self) -> int | None:
        """Reserve a slot and return its bit; `None` if all slots are in use."""
        return 1 << self._free.pop() if self._free else None

    def return_slot(self, bit: int) -> None:
        """Free a slot at once, all of whose blocks were removed."""
        self.exact &= ~bit
        self._free.append(bit.bit_length() - 1)

    def drop_slot(self, bit: int, num_blocks: int) -> None:
        """Drop all blocks of a slot; the slot is free again after the next complete sweep.

        Args:
            bit: bit of the slot.
            num_blocks: number of blocks that were added to the slot and not removed.
        """
        self._dead |= bit
        self.exact &= ~bit
        self.num_blocks -= num_blocks
        self.num_dead += num_blocks

    def add(self, keys: Sequence[int], bit: int) -> int:
        """Add blocks to a slot; return how many of them the slot already had.

        Args:
            keys: leading bits of the blocks' names (`feed_events.keys_of`).
            bit: bit of the slot.
        """
        shards, shared, repeated = self._shards, self._shared, 0
        for key in keys:
            shard = shards[key >> _SHIFT]
            held = shard.get(key)
            if held is None:
                shard[key] = bit
            elif held & bit:
                self._extra[key, bit] = self._extra.get((key, bit), 0) + 1
                repeated += 1
            else:
                shard[key] = shared(held | bit)
        self.num_collisions += repeated
        self.num_blocks += len(keys)
        return repeated

    def remove(self, keys: Sequence[int], bit: int) -> int:
        """Remove blocks from a slot; return how many of them the slot did not have.

        Args:
            keys: leading bits of the blocks' names (`feed_events.keys_of`).
            bit: bit of the slot.
        """
        shards, extra, unknown = self._shards, self._extra, 0
        for key in keys:
            shard = shards[key >> _SHIFT]
            held = shard.get(key, 0)
            if not held & bit:
                unknown += 1
            elif extra and (key, bit) in extra:
                extra[key, bit] -= 1
                if not extra[key, bit]:
                    del extra[key, bit]
            elif held == bit:
                del shard[key]
            else:
                shard[key] = self._shared(held ^ bit)
        self.num_blocks -= len(keys) - unknown
        return unknown

    def holds(self, key: int, bit: int) -> bool:
        """Return whether a slot has a block.

        Args:
            key: leading bits of the block's name.
            bit: bit of the slot.
        """
        return bool(self._shards[key >> _SHIFT].get(key, 0) & bit)

    def prefix_blocks(self, keys: Sequence[int], slots: int) -> dict[int, int]:
        """Return the number of leading blocks that each slot in the set `slots` has, by bit; slots without the first
        block are omitted.

        Args:
            keys: leading bits of the names of a prompt's full blocks, in order.
            slots: the slots to look up, as the sum of their bits.
        """
        shards, found = self._shards, dict[int, int]()
        for depth, key in enumerate(keys):
            left = slots & shards[key >> _SHIFT].get(key, 0)
            if left != slots:
                if depth:
                    _note(found, slots ^ left, depth)
                slots = left
                if not slots:
                    return found
        _note(found, slots, len(keys))
        return found

    def sweep(self) -> Iterator[None]:
        """Clear the bits of dropped slots, one dictionary per iteration, and free the slots at the end."""
        dead, num_dead = self._dead, self.num_dead
        if not dead:
            return
        shared = self._shared
        for number, shard in enumerate(self._shards):
            # A copy, since a dictionary does not shrink when its entries are deleted.
            self._shards[number] = {
                key: shared(rest) if rest != held else held for key, held in shard.items() if (rest := held & ~dead)
            }
            yield
        self._extra = {(key, bit): count for (key, bit), count in self._extra.items() if not bit & dead}
        self._sets.clear()
        self._dead &= ~dead
        self.num_dead -= num_dead
        self._free.extend(_slots(dead))
        self._free.sort(reverse=True)  # low slots first: small integers take less memory

    @property
    def has_dead(self) -> bool:
        """Whether dropped slots have not been swept."""
        return bool(self._dead)

    @property
    def num_entries(self) -> int:
        """Number of distinct blocks, including those of dropped slots that have not been swept."""
        return sum(map(len, self._shards))

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the index in bytes."""
        return sum(map(sys.getsizeof, self._shards)) + _ENTRY_BYTES * self.num_entries + sys.getsizeof(self._sets)

    def _shared(self, slots: int) -> int:
        found = self._sets.get(slots)
        if found is not None:
            return found
        if len(self._sets) < _MAX_SHARED_SETS:
            self._sets[slots] = slots
        return slots


def _note(found: dict[int, int], slots: int, depth: int) -> None:
    while slots:
        bit = slots & -slots
        found[bit] = depth
        slots ^= bit


def _slots(bits: int) -> Iterator[int]:
    while bits:
        bit = bits & -bits
        yield bit.bit_length() - 1
        bits ^= bit


class DispatchedBlocks:
    """The blocks dispatched to one replica. When the limit is exceeded, the oldest are dropped."""

    __slots__ = ("_history", "_pending")

    def __init__(self) -> None:
        self._history: OrderedDict[int, float] = OrderedDict()
        self._pending: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._history)

    def add(self, keys: Sequence[int], now: float, max_blocks: int, num_confirmed: int = 0) -> None:
        """Add the blocks of a prompt.

        Args:
            keys: keys of the prompt's leading blocks, in order.
            now: monotonic seconds.
            max_blocks: the limit.
            num_confirmed: number of leading blocks that the feed has reported; they are not pending.
        """
        history, pending = self._history, self._pending
        for key in keys:
            history[key] = now
            history.move_to_end(key)
        for key in keys[num_confirmed:]:
            pending[key] = now
        while len(history) > max_blocks:
            oldest, _ = history.popitem(last=False)
            pending.pop(oldest, None)

    def confirm(self, keys: Iterable[int]) -> None:
        """Note that the feed has reported these blocks as stored."""
        pending = self._pending
        if pending:
            for key in keys:
                pending.pop(key, None)

    def forget(self, keys: Iterable[int]) -> None:
        """Drop blocks that the feed has reported as removed, except those of a dispatch not yet confirmed."""
        history, pending = self._history, self._pending
        if history:
            for key in keys:
                if key not in pending:
                    history.pop(key, None)

    def clear(self) -> None:
        """Drop all blocks, after a restart of the replica."""
        self._history.clear()
        self._pending.clear()

    def is_pending(self, key: int, since: float) -> bool:
        """Return whether the block was dispatched at or after `since` and is not confirmed.

        Args:
            key: leading bits of the block's name.
            since: monotonic seconds.
        """
        return self._pending.get(key, -math.inf) >= since

    def is_known(self, key: int, since: float) -> bool:
        """Return whether the block was dispatched at or after `since`.

        Args:
            key: leading bits of the block's name.
            since: monotonic seconds.
        """
        return self._history.get(key, -math.inf) >= since
