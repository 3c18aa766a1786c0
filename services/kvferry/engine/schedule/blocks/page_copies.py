"""Copies of whole pages that a step makes before it writes KV (copy-on-write), and the order in which to make them."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.ids import BlockId


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy of one whole page, made before the step writes KV; a list of copies is executed in order."""

    source: BlockId
    target: BlockId


def copy_rounds(copies: Sequence[PageCopy]) -> list[list[PageCopy]]:
    """Split copies into rounds by their dependencies: rounds run in order, copies of a round in any order.

    Within a round no page is both source and target, and no page is a target twice. A step needs a second round if a
    page was copied, freed by a preempted sequence, and allocated for another copy while the step was planned.
    """
    rounds: list[list[PageCopy]] = []
    sources: set[BlockId] = set()
    targets: set[BlockId] = set()
    for copy in copies:
        if not rounds or copy.target in sources or copy.target in targets or copy.source in targets:
            rounds.append([])
            sources.clear()
            targets.clear()
        rounds[-1].append(copy)
        sources.add(copy.source)
        targets.add(copy.target)
    return rounds
