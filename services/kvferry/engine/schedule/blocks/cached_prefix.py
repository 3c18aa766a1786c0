"""The longest cached prefix of a prompt, over layer groups with sliding windows.

    block       0  1  2  3  4  5        a window of 2 blocks
    group 0     x  x  x  x  x  -        full attention: 5 blocks
    group 1     x  x  x  -  x  -        prefixes of 5 and 4 blocks lack block 3; 3 blocks are complete

A group needs only the pages that the first row after the prefix reads. So a shorter prefix may be cached when a longer
one is not, and vice versa.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from kvferry.core.ids import BlockId
from kvferry.kv.pages.layer_groups import first_block_read

NO_PAGE = BlockId(-1)
"""Table entry for a block behind the group's window. It is never read or written."""
CachedPage = Callable[[int, int], BlockId | None]
"""Looks up the page of a group for a block: (group, block) to page, or `None` without one."""


def in_order(blocks: Sequence[BlockId], further: Sequence[Sequence[BlockId]]) -> list[BlockId]:
    """Return the pages of all groups in order of position, without `NO_PAGE`.

    Args:
        blocks: pages of the first group, by position.
        further: pages of each further group, by position; each as long as `blocks`.
    """
    if not further:
        return [block for block in blocks if block >= 0]
    return [block for block in chain.from_iterable(zip(blocks, *further, strict=True)) if block >= 0]


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Pages of the leading blocks of a prompt; its length is the number of blocks."""

    blocks: list[BlockId] = field(default_factory=list)
    """Pages of the first layer group; `NO_PAGE` for blocks behind its window."""
    further: tuple[list[BlockId], ...] = ()
    """Pages of each further group, in the same form."""

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def pages(self) -> list[BlockId]:
        """All pages, in order of position."""
        return in_order(self.blocks, self.further)

    @property
    def passed(self) -> list[int]:
        """Number of leading blocks of each group without a page."""
        return [pages.count(NO_PAGE) for pages in (self.blocks, *self.further)]


def longest_prefix(
    windows: Sequence[int | None], block_tokens: int, limit: int, cached: CachedPage, known: Sequence[BlockId] = ()
) -> CachedPrefix:
    """Return the longest prefix of at most `limit` blocks for which every group has the pages that later rows read.

    Args:
        windows: sliding window of each group in tokens; `None` for full attention.
        block_tokens: tokens per block.
        limit: maximum number of blocks.
        cached: looks up pages; called at most once per page.
        known: pages of the first group for the leading blocks, which are not looked up.
    """
    found: list[dict[int, BlockId]] = [{} for _ in windows]
    found[0].update(enumerate(known))

    def first_read(group: int, length: int) -> int:
        return first_block_read(length * block_tokens, windows[group], block_tokens)

    def last_lacking(length: int) -> int | None:
        for group, pages in enumerate(found):
            for i in reversed(range(first_read(group, length), length)):
                if i in pages:
                    continue
                page = cached(group, i)
                if page is None:
                    return i
                pages[i] = page
        return None

    length = limit
    while length and (lacking := last_lacking(length)) is not None:
        length = lacking  # every prefix between the two also needs the missing page
    groups = []
    for group, pages in enumerate(found):
        first = min(length, first_read(group, length))
        groups.append([*[NO_PAGE] * first, *(pages[i] for i in range(first, length))])
    return CachedPrefix(groups[0], tuple(groups[1:]))
