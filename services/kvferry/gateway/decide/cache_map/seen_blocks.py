"""Record of the blocks of earlier prompts: how many of a prompt's tokens a cache without bounds could have had.

Names are kept as 64-bit hashes in two generations. When the young one has `capacity` names, it becomes the old one, and
the previous old one is forgotten. The last `capacity` different names are therefore always known. Until the first
generation is forgotten, the answer is exact; afterwards it is a lower bound.
"""

from collections.abc import Sequence

from kvferry.core.ids import BlockHash

MAX_SEEN_BLOCKS = 1 << 17
"""Blocks in a generation; both take at most 20 MB."""


class SeenBlocks:
    """Names of the blocks of the prompts that a gateway has routed. Not thread-safe."""

    def __init__(self, capacity: int = MAX_SEEN_BLOCKS) -> None:
        """
        Args:
            capacity: number of names in a generation, except for the names of the last prompt.
        """
        self._capacity = capacity
        self._young: set[int] = set()
        self._old: set[int] = set()
        self.is_exact = True
        """Whether no names were forgotten yet."""

    def note(self, names: Sequence[BlockHash]) -> int:
        """Add the names of a prompt's blocks; return how many of the leading ones were known.

        Args:
            names: names of the leading full blocks, in order.
        """
        hashes = list(map(hash, names))
        young, old = self._young, self._old
        known = next((i for i, one in enumerate(hashes) if one not in young and one not in old), len(hashes))
        young.update(hashes)
        if len(young) >= self._capacity:
            self.is_exact = self.is_exact and not old
            self._young, self._old = set(), young
        return known

    def __len__(self) -> int:
        """Return the number of names; a name in both generations counts twice."""
        return len(self._young) + len(self._old)
