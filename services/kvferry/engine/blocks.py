"""The pool of physical blocks: who holds each page, which may be taken next, and in which life it is.

A page has two lifetimes. `refs` counts the sequences and offers that use it; `writers` counts transports
that may still write into it. It is free only when both are zero:

    refs > 0                    held
    refs == 0, writers > 0      quarantined: nobody wants it, somebody may still scribble on it
    refs == 0, writers == 0     free: on the free list, its old content still readable until it is taken

Each page has an `epoch`, raised when the page is taken for new content, before anything is written.
A reader that finds the epoch unchanged *after* reading the data has read the content it was promised.

The free list is an intrusive doubly linked list in two arrays: O(1) to take from the left, to return on
the right, and to pull a page out of the middle when its cached content is wanted again; nothing is
allocated. Order guaranteed: least recently freed first, and of one sequence's pages the last one first,
so the shared head of a prefix survives longest (Kwon et al., "Efficient Memory Management for Large
Language Model Serving with PagedAttention", section 4.5; free-queue order as in the vLLM V1 design).
"""

from collections.abc import Callable, Iterable, Sequence

from kvferry.core.epochs import EpochTable
from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockId


class BlockPool:
    """All pages of one engine. Owned by the engine's thread; nothing else may call it."""

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
            epochs: where epochs are kept, one unsigned 64-bit number per page; a connector passes memory
                that peers can read. Default: a plain list.
            on_reuse: called with each page that is about to lose its old content.
            free_order: the initial order of the free list; default ascending.

        Raises:
            ValueError: `num_blocks` is not positive, or the other arguments do not cover the pages exactly.
        """
        if num_blocks <= 0:
            raise ValueError(f"a pool has at least one block, not {num_blocks}")
        order = list(range(num_blocks)) if free_order is None else list(free_order)
        if sorted(order) != list(range(num_blocks)):
            raise ValueError("free_order must name every block once")
        self.num_blocks = num_blocks
        self.epochs: EpochTable = [0] * num_blocks if epochs is None else epochs
        if len(self.epochs) != num_blocks:
            raise ValueError(f"epochs has {len(self.epochs)} entries for {num_blocks} blocks")
        self._on_reuse = on_reuse
        self._refs = [0] * num_blocks
        self._writers = [0] * num_blocks
        # Index num_blocks is the list's head: next[head] is the page to take next, prev[head] the last to be taken.
        self._head = num_blocks
        self._next = [0] * (num_blocks + 1)
        self._prev = [0] * (num_blocks + 1)
        self._next[self._head] = self._prev[self._head] = self._head
        self.num_free = 0
        self.num_quarantined = 0
        for block in order:
            self._append_free(block)

    def allocate(self, count: int) -> list[BlockId] | None:
        """Take `count` pages for new content, one reference each; `None` (and no change) when fewer are free."""
        if count > self.num_free:
            return None
        taken: list[BlockId] = []
        for _ in range(count):
            block = BlockId(self._next[self._head])
            self._unlink(block)
            if self._on_reuse is not None:
                self._on_reuse(block)
            self.epochs[block] += 1  # I2: before any write of the new content
            self._refs[block] = 1
            taken.append(block)
        return taken

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Add a reference to pages whose content is wanted as it is; a free one leaves the free list.

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
        """Drop one reference from each page, given in order of position; the last becomes reusable first.

        Raises:
            InvariantBroken: a page had no reference.
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
        """A transport may write these pages from now on, whatever happens to those who hold them.

        Raises:
            InvariantBroken: a page is not held.
        """
        for block in blocks:
            if self._refs[block] == 0:
                raise InvariantBroken(f"block {block} offered to a writer while nobody holds it")
            self._writers[block] += 1

    def end_write(self, blocks: Sequence[BlockId]) -> None:
        """The transport can no longer touch these pages; those that nobody holds become free.

        Raises:
            InvariantBroken: a page had no writer.
        """
        for block in reversed(blocks):
            if self._writers[block] <= 0:
                raise InvariantBroken(f"block {block} has no writer to end")
            self._writers[block] -= 1
            if self._writers[block] == 0 and self._refs[block] == 0:
                self.num_quarantined -= 1
                self._append_free(block)

    def refs(self, block: BlockId) -> int:
        """How many sequences and offers hold the page."""
        return self._refs[block]

    def is_quarantined(self, block: BlockId) -> bool:
        """Whether nobody holds the page but a transport may still write it."""
        return self._refs[block] == 0 and self._writers[block] > 0

    @property
    def num_held(self) -> int:
        """Pages with at least one reference."""
        return self.num_blocks - self.num_free - self.num_quarantined

    @property
    def is_idle(self) -> bool:
        """Whether every page is free."""
        return self.num_free == self.num_blocks

    def free_list(self) -> list[BlockId]:
        """The free pages in the order in which they will be taken; walks the whole list."""
        found: list[BlockId] = []
        block = self._next[self._head]
        while block != self._head:
            found.append(BlockId(block))
            block = self._next[block]
        return found

    def check_integrity(self) -> None:
        """I1: free + held + quarantined == total, and the free list holds exactly the free pages.

        Raises:
            InvariantBroken: with the numbers.
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

    def _append_free(self, block: int) -> None:
        last = self._prev[self._head]
        self._next[last], self._prev[block] = block, last
        self._next[block], self._prev[self._head] = self._head, block
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1
