"""Prefix index: maps block hashes to pages.

A name is a hash of the keyed chain of `core.hashing`, so equal names mean equal prefixes unless hashes collide. A hit
is therefore confirmed by comparing the block's tokens. Comparing one block is enough, since its parents in the chain
were confirmed before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockHash, BlockId
from kvferry.engine.schedule.blocks.removed_blocks import RemovedBlocks


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A cached block, identified by its name, without its tokens; for reports to other components."""

    name: BlockHash
    parent: BlockHash | None
    """Name of the preceding block; `None` for the first block of a prompt."""
    depth: int
    """Number of preceding blocks in the prompt."""


@dataclass(frozen=True, slots=True)
class CacheChange:
    """A change of the prefix index: a block was added, or, if `stored` is `None`, removed."""

    name: BlockHash
    stored: CachedBlock | None


class PrefixIndex:
    """Names of full, computed blocks and their pages. The index holds no references, so its pages may be free and
    reusable."""

    def __init__(self, *, has_feed: bool = True, removed: RemovedBlocks | None = None) -> None:
        """
        Args:
            has_feed: whether `take_changes` is called; otherwise neither changes nor removals are recorded.
            removed: record of removed blocks; `None` for an own one of the default capacity.
        """
        self._has_feed = has_feed
        self.removed = RemovedBlocks() if removed is None else removed
        self._changes: list[CacheChange] = []
        self._block_of: dict[BlockHash, BlockId] = {}
        self._content_of: dict[BlockId, tuple[BlockHash, tuple[int, ...]]] = {}
        self.version = 0
        """Number of changes; while it stays the same, lookups have the same results."""

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: BlockId) -> bool:
        """Return whether a page is in the index."""
        return block in self._content_of

    def find(self, name: BlockHash, tokens: Sequence[int], start: int = 0) -> BlockId | None:
        """Return the page of a block, or `None` if the block is not cached. The result is stale after the next
        allocation.

        Args:
            name: name of the block.
            tokens: tokens that contain the block's tokens.
            start: position of the block's first token in `tokens`.
        """
        block = self._block_of.get(name)
        if block is None:  # the most frequent case
            return None
        content = self._content_of[block][1]
        return block if content == tuple(tokens[start : start + len(content)]) else None

    def add(
        self,
        name: BlockHash,
        tokens: Sequence[int],
        block: BlockId,
        *,
        parent: BlockHash | None = None,
        depth: int = 0,
    ) -> bool:
        """Add a page that contains a completely computed block; return `False` if the index already has a page for this
        name.

        Args:
            name: hash of the block and all blocks before it.
            tokens: token ids of the block.
            block: id of the page.
            parent: hash of the previous block; `None` for a prompt's first block.
            depth: number of blocks before this one.

        Raises:
            InvariantBroken: the page already has another name.
        """
        if name in self._block_of:
            return False
        if block in self._content_of:
            raise InvariantBroken(f"block {block} already has a name; a page is named once per epoch")
        self.version += 1
        self._block_of[name] = block
        self._content_of[block] = (name, tuple(tokens))
        if self._has_feed:
            self._changes.append(CacheChange(name, CachedBlock(name, parent, depth)))
        return True

    def has_name(self, name: BlockHash) -> bool:
        """Return whether a block is in the index."""
        return name in self._block_of

    def forget(self, block: BlockId, *, is_dropped: bool = False) -> None:
        """Remove a page; do nothing if it is not in the index.

        Args:
            block: the page.
            is_dropped: whether its content must not be used any more, and not about to be overwritten.
        """
        content = self._content_of.pop(block, None)
        if content is not None:
            self.version += 1
            del self._block_of[content[0]]
            if self._has_feed:
                self._changes.append(CacheChange(content[0], None))
                self.removed.add(content[0], is_dropped=is_dropped)

    def forget_name(self, name: BlockHash) -> None:
        """Remove the page of a block, if it has one, because its content must not be used any more."""
        block = self._block_of.get(name)
        if block is not None:
            self.forget(block, is_dropped=True)

    @property
    def has_changes(self) -> bool:
        """Whether blocks were added or removed since the last call of `take_changes`."""
        return bool(self._changes)

    def take_changes(self) -> list[CacheChange]:
        """Return the blocks added and removed since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def blocks(self) -> set[BlockId]:
        """Return the set of pages in the index."""
        return set(self._content_of)
