"""Which page holds which named block: the prefix cache's memory.

A name comes from the keyed chain of `core.hashing`, so equal names mean equal prefixes unless a hash
collides; a hit is confirmed by comparing the block's tokens all the same. The chain makes the comparison
of one block enough: its parents were confirmed one by one on the way to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockHash, BlockId


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A named block as others may know it: no tokens."""

    name: BlockHash
    parent: BlockHash | None
    """`None`: the prompt's first block."""
    depth: int
    """Blocks before it in its prompt."""


@dataclass(frozen=True, slots=True)
class CacheChange:
    """One block came, or (`stored` is `None`) one went."""

    name: BlockHash
    stored: CachedBlock | None


class PrefixIndex:
    """Names of full, computed blocks. Holds no references: a page may be reused while it is listed here."""

    def __init__(self) -> None:
        self._changes: list[CacheChange] = []
        self._block_of: dict[BlockHash, BlockId] = {}
        self._content_of: dict[BlockId, tuple[BlockHash, tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def find(self, name: BlockHash, tokens: Sequence[int]) -> BlockId | None:
        """The page that holds this block, or `None`. Does not mutate; stale after the next allocation."""
        block = self._block_of.get(name)
        if block is None or self._content_of[block][1] != tuple(tokens):
            return None
        return block

    def add(
        self,
        name: BlockHash,
        tokens: Sequence[int],
        block: BlockId,
        *,
        parent: BlockHash | None = None,
        depth: int = 0,
    ) -> bool:
        """List a page whose whole content is computed; whether it was listed. The first page of a name stays.

        Raises:
            InvariantBroken: the page already holds another named block.
        """
        if name in self._block_of:
            return False
        if block in self._content_of:
            raise InvariantBroken(f"block {block} already has a name; a page is named once in each life")
        self._block_of[name] = block
        self._content_of[block] = (name, tuple(tokens))
        self._changes.append(CacheChange(name, CachedBlock(name, parent, depth)))
        return True

    def forget(self, block: BlockId) -> None:
        """The page is about to lose its content. Unlisted pages are fine."""
        content = self._content_of.pop(block, None)
        if content is not None:
            del self._block_of[content[0]]
            self._changes.append(CacheChange(content[0], None))

    def take_changes(self) -> list[CacheChange]:
        """What came and went since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def blocks(self) -> set[BlockId]:
        """The pages that hold named blocks."""
        return set(self._content_of)
