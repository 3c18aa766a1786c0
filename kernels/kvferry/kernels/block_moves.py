"""Geometry of block copies: runs of consecutive blocks, and the overlap of staged pages with pages in a different
layout."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overlay:
    """Overlap of staged pages, starting at prompt position `staged_first`, with target blocks, starting at
    `target_first`.

    staged, blocks of 16  |  0 .. 15 | 16 .. 31 | 32 .. 47 | 48 ..
    target, blocks of 24  |   0 .. 23    |   24 .. 47    | 48 ..
    """

    staged_first: int
    """Prompt position of the first staged slot."""
    target_first: int
    """Prompt position of the first slot of the first target block."""
    first_kv_head: int
    """Index of the first target head among the staged heads."""
    tokens: int
    """Length of the prompt in tokens; slots beyond it are neither read nor written."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run of consecutive blocks in a list."""

    first: int
    """First block id of the run."""
    at: int
    """Index of the run's first block in the list."""
    count: int


def runs(blocks: Sequence[int]) -> list[Run]:
    """Split a list of blocks into runs of consecutive ids, so that each run needs one copy instead of one per block."""
    found: list[Run] = []
    for at, block in enumerate(blocks):
        if found and block == found[-1].first + found[-1].count:
            last = found[-1]
            found[-1] = Run(last.first, last.at, last.count + 1)
        else:
            found.append(Run(block, at, 1))
    return found
