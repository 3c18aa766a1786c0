"""Block tables and the allocator: which pages a sequence's tokens live in.

One sequence's table, block size B = 4, after 7 prompt tokens and one generated:

    logical     0            1
    physical    7            1
    filled      4 of 4       4 of 4        the next token needs a third block

Tables grow from the left and only as far as the coming step needs, so unused slots per sequence stay
below B (Kwon et al., PagedAttention, sections 4.2 and 4.3). Several tables may hold one page; a table
about to write into a shared page gets a copy of it first (section 4.4, copy-on-write).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockHash, BlockId
from kvferry.engine.blocks import BlockPool
from kvferry.engine.prefix_index import PrefixIndex


@dataclass(slots=True)
class BlockTable:
    """Pages of one sequence in order of position. Changed only by the allocator."""

    blocks: list[BlockId] = field(default_factory=list)
    version: int = 0
    """Unlike any other table's and any before: while it stays, blocks are added at the end and nothing else changes."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy a whole page before the step writes anything."""

    source: BlockId
    target: BlockId


class Allocator:
    """Gives pages to tables and takes them back; keeps the prefix cache true while doing so.

    Owned by the engine's thread.
    """

    def __init__(self, pool: BlockPool, index: PrefixIndex, *, block_tokens: int) -> None:
        self.pool = pool
        self.index = index
        self.block_tokens = block_tokens
        self._versions = count(1)

    def blocks_for(self, num_tokens: int) -> int:
        """ceil(num_tokens / B)."""
        return -(-num_tokens // self.block_tokens)

    def peek(self, names: Sequence[BlockHash], tokens: Sequence[int], *, max_tokens: int) -> list[BlockId]:
        """The longest cached prefix of at most `max_tokens` tokens, as pages; takes no reference.

        A prompt's last token must be computed to have logits, so callers pass its length less one.
        Stale after the next allocation; `hold` what is wanted at once.
        """
        size = self.block_tokens
        found: list[BlockId] = []
        for i, name in enumerate(names[: max_tokens // size]):
            block = self.index.find(name, tokens[i * size : (i + 1) * size])
            if block is None or self.pool.is_quarantined(block):
                break
            found.append(block)
        return found

    def hold(self, table: BlockTable, blocks: Sequence[BlockId]) -> None:
        """Put cached pages at the head of an empty table, with a reference each."""
        if table.blocks:
            raise InvariantBroken(f"a prefix was to be held by a table that has {len(table.blocks)} blocks")
        self.pool.hold(blocks)
        table.blocks.extend(blocks)
        table.version = next(self._versions)

    def missing(self, table: BlockTable, num_tokens: int) -> int:
        """Pages to allocate before the table has room for `num_tokens` tokens, copy-on-write not counted."""
        return max(0, self.blocks_for(num_tokens) - len(table.blocks))

    def grow(self, table: BlockTable, *, num_computed: int, num_tokens: int) -> list[PageCopy] | None:
        """Make room to write tokens num_computed .. num_tokens-1; `None` (and no change) when pages are short.

        Returns the copies to make first: at most one, for a partly filled page that others hold too.
        """
        first_written = num_computed // self.block_tokens
        shared = [
            i
            for i in range(first_written, min(len(table.blocks), self.blocks_for(num_tokens)))
            if self.pool.refs(table.blocks[i]) > 1
        ]
        fresh = self.pool.allocate(self.missing(table, num_tokens) + len(shared))
        if fresh is None:
            return None
        copies: list[PageCopy] = []
        for i in shared:
            target = fresh.pop(0)
            if i * self.block_tokens < num_computed:  # an untouched page has nothing to copy
                copies.append(PageCopy(table.blocks[i], target))
            self.pool.release([table.blocks[i]])
            table.blocks[i] = target
            table.version = next(self._versions)
        table.blocks.extend(fresh)
        return copies

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same pages; no KV moves. What `grow` copies on write is what this made shared."""
        self.pool.hold(table.blocks)
        return BlockTable(list(table.blocks), next(self._versions))

    def free(self, table: BlockTable) -> None:
        """Give all pages back; cached content stays readable until the pages are taken again. Idempotent."""
        self.pool.release(table.blocks)
        table.blocks.clear()
        table.version = next(self._versions)

    def check_integrity(self) -> None:
        """The pool's own law, and I3: a named page is not in quarantine.

        Raises:
            InvariantBroken: with the numbers.
        """
        self.pool.check_integrity()
        bad = [b for b in self.index.blocks() if self.pool.is_quarantined(b)]
        if bad:
            raise InvariantBroken(f"blocks {bad[:8]} are in quarantine and in the prefix index")
