"""Block pool: reference counts, writer counts, epochs and free list of all physical KV pages.

A page has two counts. `refs` counts the sequences and offers that use it; `writers` counts transports that may still
write to it. A page is free only when both are zero:

    refs > 0                    held
    refs == 0, writers > 0      quarantined: no owner, but a transport may still write to it
    refs == 0, writers == 0     free: in the free list, its old content readable until it is reused

Each page has an `epoch`, incremented when the page is taken for new content, before anything is written. A reader that
finds the epoch unchanged *after* reading the data has therefore read the expected content.

The free list is an intrusive doubly linked list in two arrays: taking a page from the left, appending one on the right,
and removing one from the middle when its cached content is hit are O(1) and allocate no memory. Guaranteed order: least
recently freed first; within one sequence the last page first, so that the shared beginning of a prefix is evicted last
(Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", section 4.5;
free-queue order as in the vLLM V1 design).
"""

from collections.abc import Callable, Iterable, Sequence

from kvferry.core.epochs import EpochTable
from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockId


class BlockPool:
    """All pages of one engine. Not thread-safe; owned by the engine's thread."""

    def __init__(
        self,
        num_blocks: int,
        *,
        epochs: EpochTable | None = None,
        on_reuse: Callable[[BlockId], None] | None = None,
        free_order: Iterable[int] | None = None,
    ) -> None:
        """
        Args:
            num_blocks: pages in the pool.
            epochs: storage of the epochs, one unsigned 64-bit number per page; a connector passes memory that peers
                can read. Default: a plain list.
            on_reuse: called with each page before its old content is overwritten.
            free_order: the initial order of the free list; default ascending.

        Raises:
            ValueError: `num_blocks` is not positive, or the other arguments do not cover the pages exactly.
        """
        if num_blocks <= 0:
            raise ValueError(f"num_blocks must be positive, not {num_blocks}")
        order = list(range(num_blocks)) if free_order is None else list(free_order)
        if sorted(order) != list(range(num_blocks)):
            raise ValueError("free_order must contain every block once")
        self.num_blocks = num_blocks
        self.epochs: EpochTable = [0] * num_blocks if epochs is None else epochs
        if len(self.epochs) != num_blocks:
            raise ValueError(f"epochs has {len(self.epochs)} entries for {num_blocks} blocks")
        self._on_reuse = on_reuse
        self._refs = [0] * num_blocks
        self._writers = [0] * num_blocks
        # Index num_blocks is the list's head: next[head] is allocated next, prev[head] last.
        self._head = num_blocks
        self._next = [0] * (num_blocks + 1)
        self._prev = [0] * (num_blocks + 1)
        self._next[self._head] = self._prev[self._head] = self._head
        self.num_free = 0
        self.num_quarantined = 0
        for block in order:
            self._append_free(block)

    def allocate(self, count: int) -> list[BlockId] | None:
        """Allocate `count` pages for new content, with one reference each; return `None` (and change nothing) if fewer
        are free."""
        if count > self.num_free:
            return None
        taken: list[BlockId] = []
        block = self._next[self._head]
        for _ in range(count):
            taken.append(BlockId(block))
            block = self._next[block]
        self._next[self._head], self._prev[block] = block, self._head
        self.num_free -= count
        for block in taken:
            if self._on_reuse is not None:
                self._on_reuse(block)
            self.epochs[block] += 1  # invariant I2: before any write of the new content
            self._refs[block] = 1
        return taken

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Add a reference to pages whose content is reused; a free page is removed from the free list.

        Raises:
            InvariantBroken: a page is quarantined, so its content cannot be trusted.
        """
        for block in blocks:
            if self._refs[block] == 0:
                if self._writers[block]:
                    raise InvariantBroken(f"block {block} is in quarantine ({self._writers[block]} writers)")
                self._unlink(block)
            self._refs[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference to each page. `blocks` are in order of position; the last page is reused first.

        Raises:
            InvariantBroken: a page has no reference.
        """
        for block in reversed(blocks):
            if self._refs[block] <= 0:
                raise InvariantBroken(f"block {block} released without a reference")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._writers[block]:
                    self.num_quarantined += 1
                else:
                    self._append_free(block)

    def begin_write(self, blocks: Iterable[BlockId]) -> None:
        """Count a writer: a transport may write these pages from now on, even after all references are dropped.

        Raises:
            InvariantBroken: a page is not held.
        """
        for block in blocks:
            if self._refs[block] == 0:
                raise InvariantBroken(f"block {block} got a writer without a reference")
            self._writers[block] += 1

    def end_write(self, blocks: Sequence[BlockId]) -> None:
        """Remove a writer: the transport no longer accesses these pages. Pages without a reference become free.

        Raises:
            InvariantBroken: a page has no writer.
        """
        for block in reversed(blocks):
            if self._writers[block] <= 0:
                raise InvariantBroken(f"block {block} has no writer to end")
            self._writers[block] -= 1
            if self._writers[block] == 0 and self._refs[block] == 0:
                self.num_quarantined -= 1
                self._append_free(block)

    def outdate_free(self) -> None:
        """Increment the epoch of every free page, as if its content had been overwritten."""
        for block in self.free_list():
            self.epochs[block] += 1

    def refs(self, block: BlockId) -> int:
        """Return the number of references to the page."""
        return self._refs[block]

    def is_quarantined(self, block: BlockId) -> bool:
        """Return whether the page has no reference but a transport may still write to it."""
        return self._refs[block] == 0 and self._writers[block] > 0

    @property
    def num_held(self) -> int:
        """Pages with at least one reference."""
        return self.num_blocks - self.num_free - self.num_quarantined

    @property
    def is_idle(self) -> bool:
        """Whether every page of the pool is free."""
        return self.num_free == self.num_blocks

    def free_list(self) -> list[BlockId]:
        """Free pages in the order in which they will be taken. O(free pages)."""
        found: list[BlockId] = []
        block = self._next[self._head]
        while block != self._head:
            found.append(BlockId(block))
            block = self._next[block]
        return found

    def check_integrity(self) -> None:
        """Check invariant I1: free + held + quarantined == total, and the free list has exactly the free pages.

        Raises:
            InvariantBroken: the invariant is violated; the message has the observed counts.
        """
        free = self.free_list()
        should = {b for b in range(self.num_blocks) if not self._refs[b] and not self._writers[b]}
        quarantined = sum(1 for b in range(self.num_blocks) if not self._refs[b] and self._writers[b])
        if set(free) != should or len(free) != len(should) or len(free) != self.num_free:
            raise InvariantBroken(f"free list has {len(free)} blocks, counted {self.num_free}, expected {len(should)}")
        if quarantined != self.num_quarantined:
            raise InvariantBroken(f"{quarantined} blocks in quarantine, counted {self.num_quarantined}")
        if min(self._refs) < 0 or min(self._writers) < 0:
            raise InvariantBroken("a reference or writer count is negative")

    def check_references(self, owners: Iterable[Iterable[BlockId]]) -> None:
        """Check that each page has exactly one reference per owner.

        Args:
            owners: the pages of each owner.

        Raises:
            InvariantBroken: a page has a different number of references; the message has the numbers.
        """
        counted = [0] * self.num_blocks
        for blocks in owners:
            for block in blocks:
                counted[block] += 1
        bad = {b: pair for b, pair in enumerate(zip(counted, self._refs, strict=True)) if pair[0] != pair[1]}
        if bad:
            raise InvariantBroken(f"references of blocks (owners, counted): {dict(list(bad.items())[:8])}")

    def _append_free(self, block: int) -> None:
        last = self._prev[self._head]
        self._next[last], self._prev[block] = block, last
        self._next[block], self._prev[self._head] = self._head, block
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1
