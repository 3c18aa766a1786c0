"""Block tables and their allocator, with prefix hits and layer groups.

Tables are in `block_table`. They grow in order of position and only as far as the next step needs; with layer groups
(`kv.pages.layer_groups`), a block has a page in each group, and groups with a sliding window release the pages that no
later row reads.
"""

from collections.abc import Iterable, Sequence
from itertools import count

from kvferry.core.epochs import EpochTable
from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockHash, BlockId
from kvferry.engine.schedule.blocks.block_pool import BlockPool
from kvferry.engine.schedule.blocks.block_table import BlockTable
from kvferry.engine.schedule.blocks.cached_prefix import NO_PAGE, CachedPrefix, longest_prefix
from kvferry.engine.schedule.blocks.page_needs import PageNeeds
from kvferry.engine.schedule.blocks.prefix_index import PrefixIndex
from kvferry.engine.schedule.blocks.removed_blocks import RemovedBlocks, capacity_for
from kvferry.kv.pages.layer_groups import FULL_ATTENTION, first_block_read, handed_over


class Allocator:
    """Allocator of the pages in block tables, which also keeps the prefix index consistent.

    Owned by the engine's thread.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        *,
        block_tokens: int,
        windows: Sequence[int | None] = FULL_ATTENTION,
        further_indexes: Sequence[PrefixIndex] = (),
        step_tokens: int = 1,
    ) -> None:
        """
        Args:
            pool: the pages, all of the same size. Its `on_reuse` must remove a page from all indexes.
            index: index of the pages of the first layer group.
            block_tokens: tokens per page.
            windows: sliding window of each layer group in tokens; `None` for full attention.
            further_indexes: index of the pages of each further group. The same names stand for the same blocks.
            step_tokens: maximum number of tokens of one sequence in a step, for the pages that a window needs.

        Raises:
            ValueError: the number of groups and the number of their indexes differ.
        """
        if len(further_indexes) != len(windows) - 1:
            raise ValueError(f"{len(windows)} layer groups need {len(windows) - 1} additional prefix indexes")
        self.pool = pool
        self.index = index
        self.block_tokens = block_tokens
        self.windows = tuple(windows)
        self.needs = PageNeeds(windows, block_tokens, step_tokens)
        """Number of pages that sequences need."""
        self.has_windows = self.needs.has_windows
        """Whether pages are released behind a window."""
        self.further_indexes = tuple(further_indexes)
        self._indexes = (index, *further_indexes)
        self._versions = count(1)

    @classmethod
    def create(
        cls,
        num_blocks: int,
        *,
        block_tokens: int,
        windows: Sequence[int | None] = FULL_ATTENTION,
        step_tokens: int = 1,
        epochs: EpochTable | None = None,
    ) -> "Allocator":
        """Create an allocator with its pool and its indexes.

        Args:
            num_blocks: pages in the pool.
            block_tokens: see `Allocator`.
            windows: see `Allocator`.
            step_tokens: see `Allocator`.
            epochs: storage of the pages' epochs; see `BlockPool`.
        """
        index = PrefixIndex(removed=RemovedBlocks(capacity_for(num_blocks)))
        further = [PrefixIndex(has_feed=False, removed=index.removed) for _ in windows[1:]]

        def forget(block: BlockId) -> None:
            for each in (index, *further):
                each.forget(block)

        pool = BlockPool(num_blocks, epochs=epochs, on_reuse=forget if further else index.forget)
        return cls(
            pool,
            index,
            block_tokens=block_tokens,
            windows=windows,
            further_indexes=further,
            step_tokens=step_tokens,
        )

    def peek(
        self, names: Sequence[BlockHash], tokens: Sequence[int], *, max_tokens: int, for_load: bool = False
    ) -> CachedPrefix:
        """Look up the pages of the longest cached prefix of at most `max_tokens` tokens, without taking references.

        A group with a window needs only the pages that the first row after the prefix reads, so a shorter prefix may be
        cached when a longer one is not, and vice versa.

        A prompt's last token must always be computed to get its logits, so callers pass the prompt's length minus one.
        The result is stale after the next allocation; call `hold` on the pages before that.

        Args:
            names: names of the prompt's full blocks.
            tokens: the prompt.
            max_tokens: maximum length.
            for_load: whether the KV after the prefix is loaded from a peer, including the pages of all windows. In that
                case, only pages for full attention are looked up.
        """
        size = self.block_tokens
        limit = min(max_tokens // size, len(names))
        found: list[BlockId] = []
        if self.windows[0] is None:
            for i in range(limit):
                block = self._cached(self.index, names[i], tokens, i)
                if block is None:
                    break
                found.append(block)
            if not self.has_windows:
                return CachedPrefix(found)
            if for_load:
                return CachedPrefix(found, tuple([NO_PAGE] * len(found) for _ in self.further_indexes))
            limit = len(found)
        elif for_load:
            return CachedPrefix([], tuple([] for _ in self.further_indexes))

        def cached(group: int, i: int) -> BlockId | None:
            return self._cached(self._indexes[group], names[i], tokens, i)

        return longest_prefix(self.windows, size, limit, cached, found)

    def _cached(self, index: PrefixIndex, name: BlockHash, tokens: Sequence[int], i: int) -> BlockId | None:
        """Return the usable page of block `i` in an index; `None` without one."""
        block = index.find(name, tokens, i * self.block_tokens)
        return None if block is None or self.pool.is_quarantined(block) else block

    @property
    def cache_version(self) -> int:
        """Number of changes of the prefix indexes; while it stays the same, `peek` returns the same pages."""
        return self.index.version if not self.further_indexes else sum(each.version for each in self._indexes)

    def hold(self, table: BlockTable, prefix: CachedPrefix) -> None:
        """Append cached pages to an empty table and take one reference to each.

        Args:
            table: the empty table of a sequence.
            prefix: a result of `peek`, with no allocation since.

        Raises:
            InvariantBroken: the table is not empty.
        """
        if table.blocks:
            raise InvariantBroken(f"a prefix hit needs an empty table; this one has {len(table.blocks)} blocks")
        self.pool.hold(prefix.pages)
        table.blocks.extend(prefix.blocks)
        if self.has_windows:
            table.further = tuple(list(pages) for pages in prefix.further)
            table.passed = prefix.passed
        table.version = next(self._versions)

    def blocks_for(self, num_tokens: int) -> int:
        """See `PageNeeds.blocks_for`."""
        return self.needs.blocks_for(num_tokens)

    def missing(self, table: BlockTable, num_tokens: int) -> int:
        """Return the number of free pages that the table may need until it has slots for `num_tokens` tokens. With
        windows, this is the largest number at any time, since pages are released meanwhile.

        Args:
            table: table of the sequence.
            num_tokens: number of leading tokens that need slots.
        """
        return self.needs.missing(len(table.blocks), table.passed, num_tokens)

    def needed(self, hit: CachedPrefix, num_tokens: int) -> int:
        """Return the number of free pages that a new sequence of `num_tokens` tokens needs; see `missing`.

        Args:
            hit: its longest cached prefix. Its pages without a reference are still free, so they are counted too.
            num_tokens: number of tokens.
        """
        passed = hit.passed if self.has_windows else ()
        return self.needs.missing(len(hit), passed, num_tokens) + self.num_free(hit)

    def num_free(self, hit: CachedPrefix) -> int:
        """Return the number of pages of a cached prefix that have no reference."""
        return sum(self.pool.refs(block) == 0 for block in hit.pages) if hit.blocks else 0

    def growth(self, table: BlockTable, num_tokens: int) -> int:
        """Return the number of pages that `grow` allocates for `num_tokens` tokens.

        Args:
            table: table of the sequence.
            num_tokens: number of leading tokens that need slots.
        """
        return max(0, self.blocks_for(num_tokens) - len(table.blocks)) * len(self.windows)

    def grow(self, table: BlockTable, *, num_tokens: int) -> bool:
        """Allocate the pages that a table lacks for its first `num_tokens` tokens; change nothing and return `False` if
        too few are free.

        Pages that several tables share are full and computed, so that no table writes to a shared page.
        """
        size = self.blocks_for(num_tokens) - len(table.blocks)
        if size <= 0:
            return True  # the most frequent case: decoding within a page
        groups = self._groups(table)
        fresh = self.pool.allocate(size * len(groups))
        if fresh is None:
            return False
        for group, pages in enumerate(groups):
            pages.extend(fresh[group * size : (group + 1) * size])
        return True

    def reserve_load(self, table: BlockTable, *, num_loaded: int, num_tokens: int) -> bool:
        """Allocate the pages of a sequence whose KV is loaded; change nothing and return `False` if too few are free.

        Args:
            table: the table, with the pages of its prefix (`peek` with `for_load`).
            num_loaded: number of leading tokens whose KV is loaded.
            num_tokens: number of tokens for which the table has slots afterwards.
        """
        if not self.has_windows:
            return self.grow(table, num_tokens=num_tokens)
        groups, end = self._groups(table), self.blocks_for(num_tokens)
        firsts = [blocks.start for blocks in handed_over(num_loaded, self.windows, self.block_tokens)]
        lacking = [
            [i for i in range(first, end) if i >= len(pages) or pages[i] == NO_PAGE]
            for first, pages in zip(firsts, groups, strict=True)
        ]
        fresh = self.pool.allocate(sum(map(len, lacking)))
        if fresh is None:
            return False
        for group, pages in enumerate(groups):
            pages.extend([NO_PAGE] * (end - len(pages)))
            for i in lacking[group]:
                pages[i] = fresh.pop()
            table.passed[group] = pages.count(NO_PAGE)
        return True

    def _groups(self, table: BlockTable) -> tuple[list[BlockId], ...]:
        """Return the page lists of all groups; an empty table has none, so they are created."""
        if self.has_windows and not table.passed:
            table.further, table.passed = tuple([] for _ in self.further_indexes), [0] * len(self.windows)
        return (table.blocks, *table.further)

    def release_passed(self, table: BlockTable, num_computed: int, *, boundary_blocks: int | None = None) -> None:
        """Release the pages that no row after the last boundary reads. They stay in the prefix index until they are
        reused.

        Args:
            table: the table.
            num_computed: number of leading tokens that no step computes again, while the sequence runs.
            boundary_blocks: number of blocks between boundaries; overrides the number of `needs`.
        """
        if not self.has_windows or not table.passed:
            return
        size = self.block_tokens * (boundary_blocks or self.needs.boundary_blocks)
        boundary = num_computed // size * size
        groups = (table.blocks, *table.further)
        for group, (window, pages) in enumerate(zip(self.windows, groups, strict=True)):
            first, passed = first_block_read(boundary, window, self.block_tokens), table.passed[group]
            if first > passed:
                self.pool.release(pages[passed:first])
                pages[passed:first] = [NO_PAGE] * (first - passed)
                table.passed[group] = first

    def name_block(
        self, table: BlockTable, i: int, name: BlockHash, tokens: Sequence[int], parent: BlockHash | None
    ) -> None:
        """Add the pages of a full, computed block to the prefix index; loaded KV has no pages behind a window.

        Args:
            table: the sequence's table.
            i: number of the block.
            name: its name.
            tokens: its tokens.
            parent: name of the block before it.
        """
        if table.blocks[i] != NO_PAGE:
            self.index.add(name, tokens, table.blocks[i], parent=parent, depth=i)
        for index, pages in zip(self.further_indexes, table.further, strict=False):
            if pages[i] != NO_PAGE:
                index.add(name, tokens, pages[i])

    def forget(self, table: BlockTable, names: Iterable[BlockHash]) -> None:
        """Remove a sequence's blocks from the prefix index, including blocks whose pages were released behind a
        window.

        Args:
            table: table of the sequence.
            names: names of the sequence's full blocks, used to find pages that its table no longer has.
        """
        for block in table.blocks:
            self.index.forget(block, is_dropped=True)
        if self.has_windows:
            for name in names:
                for index in self._indexes:
                    index.forget_name(name)

    def free(self, table: BlockTable) -> None:
        """Free all pages of a table; cached content stays readable until the pages are reused. Idempotent."""
        self.pool.release(table.pages if self.has_windows else table.blocks)
        table.blocks.clear()
        table.further, table.passed = (), []
        table.version = next(self._versions)

    def is_listed(self, block: BlockId) -> bool:
        """Return whether a page is in a prefix index."""
        return any(block in index for index in self._indexes)

    def reset_cache(self) -> int:
        """Remove all blocks from the prefix index, and give free pages a new epoch, so that a reader of their content
        finds it outdated; return the number of removed blocks."""
        removed = self.index.blocks()
        for index in self._indexes:
            for block in index.blocks():
                index.forget(block, is_dropped=True)
        self.pool.outdate_free()
        return len(removed)

    def check_integrity(self) -> None:
        """Check the pool's invariants, and invariant I3: a named page is not in quarantine, and has a name in only one
        group.

        Raises:
            InvariantBroken: an invariant is violated; the message has the observed counts.
        """
        self.pool.check_integrity()
        named = [index.blocks() for index in self._indexes]
        bad = [b for blocks in named for b in blocks if self.pool.is_quarantined(b)]
        if bad:
            raise InvariantBroken(f"blocks {bad[:8]} are in quarantine and in the prefix index")
        num_named = sum(map(len, named))
        if num_named != len(set().union(*named)):
            raise InvariantBroken(f"the prefix indexes have {num_named} entries for {len(set().union(*named))} pages")
