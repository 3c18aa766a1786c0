"""Pairs of row and expert, sorted by expert and divided into tiles of one expert each, without host synchronization."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTiles:
    """Pairs of row and expert, sorted by expert, in tiles of one expert each."""

    order: torch.Tensor
    """[pairs] int64: sorted pairs."""
    ends: torch.Tensor
    """[experts] int64: end of each expert's pairs in `order`."""
    expert_of: torch.Tensor
    """[tiles] int64: expert of each tile; for unused tiles, the number of experts."""
    first_of: torch.Tensor
    """[tiles] int64: index of each tile's first pair in `order`."""


def divide(chosen: torch.Tensor, experts: int, rows: int) -> ExpertTiles:
    """Sort the pairs by expert and divide them into tiles.

    Args:
        chosen: [T, A] int64.
        experts: number of experts.
        rows: pairs per tile.
    """
    of_pair = chosen.flatten()
    pairs = len(of_pair)
    order = torch.argsort(of_pair, stable=True)
    counts = of_pair.new_zeros(experts).scatter_add_(0, of_pair, torch.ones_like(of_pair))
    ends = counts.cumsum(0)
    tiles_of = (counts + (rows - 1)) // rows
    tile_ends = tiles_of.cumsum(0)
    # At most as many experts as there are pairs have work, and each has at most one partially filled tile.
    most = (pairs + min(experts, pairs) * (rows - 1)) // rows
    tiles = torch.arange(most, device=chosen.device)
    expert_of = torch.searchsorted(tile_ends, tiles, right=True)
    known = expert_of.clamp(max=experts - 1)
    first_of = (ends - counts)[known] + (tiles - (tile_ends - tiles_of)[known]) * rows
    return ExpertTiles(order, ends, expert_of, first_of)
