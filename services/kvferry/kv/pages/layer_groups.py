"""Groups of layers with separate pages: layers with full attention in one group, each sliding window in further groups.

A page has the KV of one block of tokens for the layers of one group. All groups have pages of the same size, so one
pool serves them all (Zhang et al., Jenga: Effective Memory Management for Serving LLM with Heterogeneity, SOSP 2025;
the hybrid KV cache manager of vLLM divides layers in the same way). Six layers, of which two have full attention:

    layer       0  1  2  3  4  5        windows of layers 0, 1, 3 and 4
    group 0           2        5        a page per block, for the whole context
    group 1     0  1                    pages of the last blocks only
    group 2              3  4           the same

The last group of a window may have fewer layers than its pages have places; the remaining places stay unused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.weights.config import ModelConfig

FULL_ATTENTION: tuple[int | None, ...] = (None,)
"""Windows of a single group of all layers, whose pages are kept for the whole context."""


def first_block_read(position: int, window: int | None, block_tokens: int) -> int:
    """Return the first block that rows from `position` on read: the block of position + 1 - window, or 0 without a
    window.

    Args:
        position: position of the row, from 0.
        window: size of the window in tokens; `None` for full attention.
        block_tokens: tokens per block.
    """
    return 0 if window is None else max(0, position + 1 - window) // block_tokens


def max_blocks(window: int, *, block_tokens: int, step_tokens: int, boundary_blocks: int = 1) -> int:
    """Return the largest number of pages that a group with a window holds at once for a sequence of any length.

    Args:
        window: sliding window of the group's layers in tokens.
        block_tokens: tokens per page.
        step_tokens: maximum number of tokens of one sequence in a step.
        boundary_blocks: pages are released up to a multiple of this number of full blocks.
    """
    # Maximum number of tokens between such a boundary and the start of a step.
    behind = boundary_blocks * block_tokens - 1
    of_window, of_step = -(-(window - 1) // block_tokens), -(-(behind + step_tokens) // block_tokens)
    return of_window + of_step


def pages_of(num_blocks: int, limits: Sequence[int | None]) -> int:
    """Return the number of pages of a sequence over all groups.

    Args:
        num_blocks: number of blocks of the sequence.
        limits: largest number of pages of each group (`max_blocks`); `None` for full attention.
    """
    return sum(num_blocks if limit is None else min(num_blocks, limit) for limit in limits)


def handed_over(num_tokens: int, windows: Sequence[int | None], block_tokens: int) -> tuple[range, ...]:
    """Return the blocks of each group whose pages are handed off: the blocks that rows after the last full block read.

    A ticket has the pages of the first group in order, then the pages of each further group.

    Args:
        num_tokens: number of tokens whose KV is handed off.
        windows: sliding window of each group in tokens; `None` for full attention.
        block_tokens: tokens per page.
    """
    boundary, end = num_tokens // block_tokens * block_tokens, -(-num_tokens // block_tokens)
    return tuple(range(first_block_read(boundary, window, block_tokens), end) for window in windows)


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Division of a model's layers into groups."""

    windows: tuple[int | None, ...]
    """Sliding window of each group's layers in tokens; `None` for full attention, or if windows differ."""
    layers: tuple[tuple[int, ...], ...]
    """Layers of each group, ascending. A page holds as many layers as the first group has."""

    @classmethod
    def single(cls, num_layers: int) -> "LayerGroups":
        """Return one group of all layers, whose pages are kept for the whole context."""
        return cls(FULL_ATTENTION, (tuple(range(num_layers)),))

    @classmethod
    def of(cls, windows: Sequence[int | None]) -> "LayerGroups":
        """Divide layers by their windows into groups as large as the full-attention group or, without such a group, as
        the smallest set of layers with the same window.

        Args:
            windows: sliding window of each layer; `None` for full attention.
        """
        by_window: dict[int | None, list[int]] = {None: []}
        for layer, window in enumerate(windows):
            by_window.setdefault(window, []).append(layer)
        sets = [(window, layers) for window, layers in by_window.items() if layers]
        size = len(by_window[None]) or min(len(layers) for _, layers in sets)
        groups = [
            (window, tuple(layers[first : first + size]))
            for window, layers in sets
            for first in range(0, len(layers), size)
        ]
        return cls(tuple(window for window, _ in groups), tuple(layers for _, layers in groups))

    @property
    def page_layers(self) -> int:
        """Number of layers for which a page has places."""
        return len(self.layers[0])

    @property
    def is_divided(self) -> bool:
        """Whether there are several groups."""
        return len(self.layers) > 1

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """(group, place in the page) of each layer."""
        found = {
            layer: (group, place) for group, layers in enumerate(self.layers) for place, layer in enumerate(layers)
        }
        return tuple(found[layer] for layer in range(len(found)))

    def max_pages(self, num_tokens: int, *, block_tokens: int, step_tokens: int) -> int:
        """Return the largest number of pages that a sequence holds at once while it grows to `num_tokens` tokens.

        Args:
            num_tokens: number of tokens of the sequence in the end.
            block_tokens: tokens per block.
            step_tokens: maximum number of tokens of one sequence in a step.
        """
        limits = [
            None if window is None else max_blocks(window, block_tokens=block_tokens, step_tokens=step_tokens)
            for window in self.windows
        ]
        return pages_of(-(-num_tokens // block_tokens), limits)


def choose_groups(config: ModelConfig, *, context_tokens: int, block_tokens: int, step_tokens: int) -> LayerGroups:
    """Choose the layer groups of a model: `LayerGroups.of`, if a sequence that fills the context then takes less memory
    than with a single group of all layers; otherwise the single group.

    Args:
        config: the model.
        context_tokens: context length that is served.
        block_tokens: tokens per page.
        step_tokens: maximum number of tokens of one sequence in a step.
    """
    whole = LayerGroups.single(config.num_layers)
    divided = LayerGroups.of([config.window_of(layer) for layer in range(config.num_layers)])

    def size(groups: LayerGroups) -> int:
        pages = groups.max_pages(context_tokens, block_tokens=block_tokens, step_tokens=step_tokens)
        return groups.page_layers * pages

    return divided if size(divided) < size(whole) else whole
