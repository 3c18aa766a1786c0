"""Full blocks of sequences: added to the prefix index, stored in tiers, and reported to the reader of a hand-off.
Pure."""

from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.blocks.cached_prefix import NO_PAGE
from kvferry.engine.schedule.step.kv_jobs import Export, NewBlocks, StoreJob
from kvferry.engine.schedule.step.sequence import Sequence
from kvferry.kv.interface.tiering import ObjectKey


class FullBlocks:
    """Processes full blocks: each is added to the prefix index, stored and reported once its KV is completely computed.
    Then the pages behind the model's sliding windows are released."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.object_blocks = 0
        """Blocks per storage object; 0 disables stores."""
        self._stores: list[StoreJob] = []
        self._progress: list[NewBlocks] = []

    def take_stores(self) -> list[StoreJob]:
        """Return the storage objects completed since the last call. Take references to their pages before the next
        `schedule`."""
        stores, self._stores = self._stores, []
        return stores

    def take_progress(self) -> list[NewBlocks]:
        """Return the blocks completed since the last call, for prompts whose KV will be handed off."""
        progress, self._progress = self._progress, []
        return progress

    def forget(self, sequence: Sequence) -> None:
        """Remove the blocks of a sequence from the prefix index."""
        self.allocator.forget(sequence.kv.table, sequence.kv.names)

    def list_full(self, sequence: Sequence) -> None:
        """Add all newly full and computed blocks to the prefix index, plan their stores, and report those that will be
        handed off."""
        size = self.allocator.block_tokens
        kv = sequence.kv
        full = kv.num_computed // size
        if full <= kv.num_listed:
            return
        full = min(full, sequence.num_tokens // size)  # blocks with draft tokens are named once the tokens are accepted
        names = sequence.name_blocks()
        for i in range(kv.num_listed, full):
            tokens, parent = tuple(sequence.sampling.tokens[i * size : (i + 1) * size]), names[i - 1] if i else None
            self.allocator.name_block(kv.table, i, names[i], tokens, parent)
        kv.listed_to(full)
        kv.written_to(min(full, sequence.request.num_prompt // size) * size)
        self._plan_stores(sequence, full)
        is_followed = sequence.request.exports and kv.num_computed < sequence.num_tokens
        if is_followed and self.allocator.windows[0] is None:
            new = slice(kv.num_reported, full)
            pages = tuple(kv.table.blocks[new])
            epochs = tuple(self.allocator.pool.epochs[b] for b in pages)
            self._progress.append(NewBlocks(sequence.request_id, pages, epochs, tuple(names[new])))
            kv.reported_to(full)
        self.allocator.release_passed(kv.table, full * size)

    def list_loaded(self, sequence: Sequence) -> None:
        """Add the full blocks of a sequence whose KV was loaded to the prefix index; see `list_full`."""
        # Blocks cached only in groups with full attention now have loaded pages in the groups with sliding windows too.
        sequence.kv.listed_to(min([sequence.kv.num_listed, *sequence.kv.table.passed[1:]]))
        self.list_full(sequence)

    def _plan_stores(self, sequence: Sequence, full: int) -> None:
        """Plan the stores of complete objects among the first `full` blocks, each only once."""
        size = self.object_blocks
        if not size:
            return
        for end in range((sequence.kv.num_stored // size + 1) * size, full + 1, size):
            key = ObjectKey(sequence.kv.names[end - 1], sequence.request.scope)
            pages = tuple(sequence.kv.table.whole_blocks(range(end - size, end)))
            if NO_PAGE not in pages:  # otherwise the sequence began after the object's first block
                self._stores.append(StoreJob(key, pages))
            sequence.kv.stored_to(end)

    def export(self, sequence: Sequence, num_tokens: int) -> Export:
        """Move the pages of a finished prefill, which hold the KV of `num_tokens` tokens, from its table to an
        export.

        Args:
            sequence: a sequence whose prompt is computed; its table is freed.
            num_tokens: number of leading tokens whose KV the pages hold.
        """
        table = sequence.kv.table
        self.allocator.release_passed(table, num_tokens, boundary_blocks=1)
        pages = tuple(table.handed_over(self.allocator.windows, num_tokens, self.allocator.block_tokens))
        self.allocator.pool.hold(pages)
        self.allocator.free(table)
        return Export(pages, tuple(self.allocator.pool.epochs[b] for b in pages), num_tokens)

    def export_full(self, sequence: Sequence) -> Export | None:
        """Return the pages of the full blocks, without references; `None` if no blocks are full."""
        size = self.allocator.block_tokens
        num_tokens = sequence.kv.num_computed // size * size
        if not num_tokens:
            return None
        pages = tuple(sequence.kv.table.handed_over(self.allocator.windows, num_tokens, size))
        return Export(pages, tuple(self.allocator.pool.epochs[b] for b in pages), num_tokens)
