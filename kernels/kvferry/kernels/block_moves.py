"""Which blocks go where: runs of neighbours, and how staged pages of one layout lie over pages of another."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overlay:
    """Staged pages hold positions `staged_first ..` of a prompt, target blocks positions `target_first ..`.

    staged, 16 a block    |  0 .. 15 | 16 .. 31 | 32 .. 47 | 48 ..
    target, 24 a block    |   0 .. 23    |   24 .. 47    | 48 ..
    """

    staged_first: int
    """Position of the first staged slot."""
    target_first: int
    """Position of the first target block's first slot."""
    head_start: int
    """Which of the staged heads is the targets' first."""
    tokens: int
    """Where the prompt ends: slots from there on are neither read nor written."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring blocks that stand in the same order on both sides."""

    first: int
    """Block where it begins."""
    at: int
    """Its place in the list."""
    count: int


def runs(blocks: Sequence[int]) -> list[Run]:
    """A list of blocks cut where the next is not the neighbour: one copy each instead of one a block."""
    found: list[Run] = []
    for at, block in enumerate(blocks):
        if found and block == found[-1].first + found[-1].count:
            last = found[-1]
            found[-1] = Run(last.first, last.at, last.count + 1)
        else:
            found.append(Run(block, at, 1))
    return found
