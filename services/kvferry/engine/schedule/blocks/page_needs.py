"""Number of pages that a sequence needs at once, over layer groups with sliding windows."""

from collections.abc import Sequence

from kvferry.kv.pages.layer_groups import FULL_ATTENTION, max_blocks, pages_of


class PageNeeds:
    """Page needs of the sequences of one engine."""

    def __init__(self, windows: Sequence[int | None], block_tokens: int, step_tokens: int) -> None:
        """
        Args:
            windows: sliding window of each layer group in tokens; `None` for full attention.
            block_tokens: tokens per page.
            step_tokens: maximum number of tokens of one sequence in a step.
        """
        self.windows = tuple(windows)
        self.block_tokens = block_tokens
        self.has_windows = self.windows != FULL_ATTENTION
        """Whether pages are released behind a window."""
        self._step_tokens = step_tokens
        self.boundary_blocks = 1
        """Number of full blocks between boundaries, up to which pages behind windows are released; see
        `set_boundaries`."""
        self.set_boundaries(1)

    def set_boundaries(self, blocks: int) -> None:
        """Set the number of blocks between boundaries, for example the number of blocks of a storage object."""
        self.boundary_blocks = blocks
        self._limits = [
            None
            if window is None
            else max_blocks(
                window, block_tokens=self.block_tokens, step_tokens=self._step_tokens, boundary_blocks=blocks
            )
            for window in self.windows
        ]

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks needed for `num_tokens` tokens: ceil(num_tokens / block_tokens)."""
        return -(-num_tokens // self.block_tokens)

    def pages_for(self, num_tokens: int) -> int:
        """Return the largest number of pages that a sequence holds at once while it grows to `num_tokens` tokens, over
        all layer groups."""
        return pages_of(self.blocks_for(num_tokens), self._limits)

    def max_tokens(self, num_pages: int) -> int:
        """Return the length of the longest sequence of full blocks for which `num_pages` pages suffice."""
        low, high = 0, num_pages
        if None not in self.windows:
            high = max(high, 1 << 40)  # with windows only, the number of pages is bounded for any length
        while low < high:
            middle = (low + high + 1) // 2
            if self.pages_for(middle * self.block_tokens) <= num_pages:
                low = middle
            else:
                high = middle - 1
        return low * self.block_tokens

    def missing(self, num_blocks: int, passed: Sequence[int], num_tokens: int) -> int:
        """Return the largest number of further pages that a sequence needs at any time while it grows to `num_tokens`
        tokens.

        Args:
            num_blocks: number of blocks in its table.
            passed: number of blocks that each group has released; empty for none.
            num_tokens: number of tokens.
        """
        if not self.has_windows:
            return max(0, self.blocks_for(num_tokens) - num_blocks)
        blocks, behind = self.blocks_for(num_tokens), passed or [0] * len(self.windows)
        return sum(
            max(0, (blocks if limit is None else min(blocks, limit)) - num_blocks + gone)
            for limit, gone in zip(self._limits, behind, strict=True)
        )
