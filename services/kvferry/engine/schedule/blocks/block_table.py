"""Block tables, with the pages of layer groups.

One sequence's table, block size B = 4, after 7 prompt tokens and one generated:

    logical     0            1
    physical    7            1
    filled      4 of 4       4 of 4        the next token needs a third block

Tables grow in order of position and only as far as the next step needs, so each sequence has fewer than B unused slots
(Kwon et al., PagedAttention, sections 4.2 and 4.3). Several tables may share full pages, which none of
them writes to.

With layer groups (`kv.pages.layer_groups`), a block has a page in each group. A group with a sliding window releases
the pages that no later row reads:

    logical          0    1    2    3    4
    group 0          7    1    5    2    9     full attention
    group 1          -    -    3    8    4     a window of 6 tokens, 18 tokens computed

Released pages are counted from the last full block instead of the last token. The indexed blocks at that boundary are
therefore complete in all groups, and a sequence can continue from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockId
from kvferry.engine.schedule.blocks.cached_prefix import NO_PAGE, in_order
from kvferry.kv.pages.layer_groups import handed_over


@dataclass(slots=True)
class BlockTable:
    """Pages of one sequence in order of position. Changed only by the allocator."""

    blocks: list[BlockId] = field(default_factory=list)
    """Pages of the first layer group."""
    version: int = 0
    """Version number, unique over the allocator's lifetime; while it is unchanged, blocks were only appended to this
    table, or released behind a window."""
    further: tuple[list[BlockId], ...] = ()
    """Pages of each further group, as many as `blocks`; empty with one group, or without pages."""
    passed: list[int] = field(default_factory=list)
    """Number of leading entries of each group that are `NO_PAGE`; empty without windows, or without pages."""

    @property
    def pages(self) -> list[BlockId]:
        """All pages, in order of position."""
        return in_order(self.blocks, self.further)

    @property
    def groups(self) -> tuple[list[BlockId], ...]:
        """Pages of each group."""
        return (self.blocks, *self.further)

    def whole_blocks(self, blocks: range) -> list[BlockId]:
        """Return the pages of all groups of some blocks, block by block; entries of blocks behind a window are
        `NO_PAGE`."""
        if not self.further:
            return self.blocks[blocks.start : blocks.stop]
        return [pages[i] for i in blocks for pages in self.groups]

    def handed_over(self, windows: Sequence[int | None], num_tokens: int, block_tokens: int) -> list[BlockId]:
        """Return the pages with which a peer continues after `num_tokens` tokens, in the order of a ticket.

        Args:
            windows: sliding window of each layer group in tokens; `None` for full attention.
            num_tokens: number of leading tokens that are computed.
            block_tokens: tokens per block.

        Raises:
            InvariantBroken: a page was released, or never allocated.
        """
        parts = handed_over(num_tokens, windows, block_tokens)
        found = [p for pages, part in zip(self.groups, parts, strict=True) for p in pages[part.start : part.stop]]
        if len(found) != sum(map(len, parts)) or NO_PAGE in found:
            raise InvariantBroken(f"a table lacks pages for the {num_tokens} tokens to hand off")
        return found
