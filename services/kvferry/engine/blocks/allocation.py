"""Block tables and their allocator, with prefix hits and copy-on-write.

One sequence's table, block size B = 4, after 7 prompt tokens and one generated:

    logical     0            1
    physical    7            1
    filled      4 of 4       4 of 4        the next token needs a third block

Tables grow in order of position and only as far as the next step needs, so each sequence has fewer than B unused slots
(Kwon et al., PagedAttention, sections 4.2 and 4.3). Several tables may share one page; a shared page is copied before a
table writes to it (section 4.4, copy-on-write).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockHash, BlockId
from kvferry.engine.blocks.block_pool import BlockPool
from kvferry.engine.blocks.prefix_index import PrefixIndex


@dataclass(slots=True)
class BlockTable:
    """Pages of one sequence in order of position. Changed only by the allocator."""

    blocks: list[BlockId] = field(default_factory=list)
    version: int = 0
    """Version number, unique over the allocator's lifetime; while it is unchanged, blocks were only appended to this
    table."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy of one whole page, made before the step writes KV; a list of copies is executed in order."""

    source: BlockId
    target: BlockId


def copy_rounds(copies: Sequence[PageCopy]) -> list[list[PageCopy]]:
    """Split copies into rounds by their dependencies: rounds run in order, copies of a round in any order.

    Within a round no page is both source and target, and no page is a target twice. A step needs a second round if a
    page was copied, freed by a preempted sequence, and allocated for another copy while the step was planned.
    """
    rounds: list[list[PageCopy]] = []
    sources: set[BlockId] = set()
    targets: set[BlockId] = set()
    for copy in copies:
        if not rounds or copy.target in sources or copy.target in targets or copy.source in targets:
            rounds.append([])
            sources.clear()
            targets.clear()
        rounds[-1].append(copy)
        sources.add(copy.source)
        targets.add(copy.target)
    return rounds


class Allocator:
    """Allocator of the pages in block tables, which also keeps the prefix index consistent.

    Owned by the engine's thread.
    """

    def __init__(self, pool: BlockPool, index: PrefixIndex, *, block_tokens: int) -> None:
        self.pool = pool
        self.index = index
        self.block_tokens = block_tokens
        self._versions = count(1)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks needed for `num_tokens` tokens: ceil(num_tokens / block_tokens)."""
        return -(-num_tokens // self.block_tokens)

    def peek(self, names: Sequence[BlockHash], tokens: Sequence[int], *, max_tokens: int) -> list[BlockId]:
        """Look up the pages of the longest cached prefix of at most `max_tokens` tokens, without taking references.

        A prompt's last token must always be computed to get its logits, so callers pass the prompt's length minus one.
        The result is stale after the next allocation; call `hold` on the pages before that.
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
        """Append cached pages to an empty table and take one reference to each."""
        if table.blocks:
            raise InvariantBroken(f"a prefix hit needs an empty table; this one has {len(table.blocks)} blocks")
        self.pool.hold(blocks)
        table.blocks.extend(blocks)
        table.version = next(self._versions)

    def missing(self, table: BlockTable, num_tokens: int) -> int:
        """Return the number of pages to allocate until the table has slots for `num_tokens` tokens, without
        copy-on-write."""
        return max(0, self.blocks_for(num_tokens) - len(table.blocks))

    def grow(
        self, table: BlockTable, *, num_computed: int, num_tokens: int, may_copy: bool = True
    ) -> list[PageCopy] | None:
        """Allocate pages to write positions num_computed .. num_tokens-1; change nothing and return `None` if too few
        are free.

        Args:
            table: the table to extend.
            num_computed: number of leading tokens whose KV is in the table's pages.
            num_tokens: number of tokens for which the table has slots afterwards.
            may_copy: whether the caller can copy pages; if not, the result is `None` when a shared page would be
                written.

        Returns:
            The page copies to make before the write: at most one, of a partly filled shared page.
        """
        first_written = num_computed // self.block_tokens
        fits_page = num_tokens <= (first_written + 1) * self.block_tokens and first_written < len(table.blocks)
        if fits_page and self.pool.refs(table.blocks[first_written]) <= 1:
            return []  # the most frequent case: a decode writes to a page that only it uses
        shared = [
            i
            for i in range(first_written, min(len(table.blocks), self.blocks_for(num_tokens)))
            if self.pool.refs(table.blocks[i]) > 1
        ]
        if shared and not may_copy:
            return None
        fresh = self.pool.allocate(self.missing(table, num_tokens) + len(shared))
        if fresh is None:
            return None
        copies: list[PageCopy] = []
        for i in shared:
            target = fresh.pop(0)
            if i * self.block_tokens < num_computed:  # a page without computed tokens needs no copy
                copies.append(PageCopy(table.blocks[i], target))
            self.pool.release([table.blocks[i]])
            table.blocks[i] = target
            table.version = next(self._versions)
        table.blocks.extend(fresh)
        return copies

    def fork(self, table: BlockTable) -> BlockTable:
        """Create a second table over the same pages without copying KV.

        The first table that writes to the partly filled page gets a copy of it from `grow`, and the runner makes
        the copy before the step's writes (Kwon et al., PagedAttention, section 4.4).
        """
        self.pool.hold(table.blocks)
        return BlockTable(list(table.blocks), next(self._versions))

    def free(self, table: BlockTable) -> None:
        """Free all pages of a table; cached content stays readable until the pages are reused. Idempotent."""
        self.pool.release(table.blocks)
        table.blocks.clear()
        table.version = next(self._versions)

    def reset_cache(self) -> int:
        """Remove all blocks from the prefix index, and give free pages a new epoch, so that a reader of their content
        finds it outdated; return the number of removed blocks."""
        blocks = self.index.blocks()
        for block in blocks:
            self.index.forget(block)
        self.pool.outdate_free()
        return len(blocks)

    def check_integrity(self) -> None:
        """Check the pool's invariants and invariant I3: a named page is not in quarantine.

        Raises:
            InvariantBroken: an invariant is violated; the message has the observed counts.
        """
        self.pool.check_integrity()
        bad = [b for b in self.index.blocks() if self.pool.is_quarantined(b)]
        if bad:
            raise InvariantBroken(f"blocks {bad[:8]} are in quarantine and in the prefix index")
