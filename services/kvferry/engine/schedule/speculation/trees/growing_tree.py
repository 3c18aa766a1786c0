"""Growth of a tree from the candidates of a head: the most probable tokens of each node, best first. Pure.

The value of a node is the product of the probabilities on its path, which estimates the probability that the node is
accepted (Li et al., EAGLE-2, 2024, section 4). A head computes the candidates of the best nodes of a level, and the
best nodes of all levels are the draft. A tree of width 1 is a chain.
"""

import heapq
from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvferry.engine.schedule.step.draft_tree import is_chain

MAX_NODES = 32
"""Maximum number of draft tokens of a tree."""
MAX_WIDTH = 8
"""Maximum number of candidates of a node."""
MIN_CANDIDATE = 0.03
"""Minimum probability of a candidate in a tree of width 2 or more."""

Candidate = tuple[int, float]
"""Token and its probability, according to a head."""


class Node(NamedTuple):
    """A draft token of a tree."""

    token: int
    parent: int
    """Row of the parent; 0 is the root."""
    probability: float
    """Probability of the token after its path, according to the head."""
    value: float
    """Product of the probabilities on the path."""


class TreeRows(NamedTuple):
    """The nodes of a tree in the order of rows."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Empty for a chain."""
    probabilities: tuple[float, ...]


class GrowingTree:
    """Nodes in the order in which they were added; node i has row i + 1."""

    __slots__ = ("_level", "nodes")

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._level = range(0)

    def add_level(self, candidates: Sequence[tuple[int, Sequence[Candidate]]]) -> None:
        """Add the next level.

        Args:
            candidates: candidates of each computed row, with the row.
        """
        first = len(self.nodes)
        for row, found in candidates:
            value = self.nodes[row - 1].value if row else 1.0
            self.nodes += [Node(token, row, share, share * value) for token, share in found]
        self._level = range(first, len(self.nodes))

    def frontier(self, width: int) -> list[int]:
        """Return the rows of the most valuable nodes of the last level, at most `width`, in order."""
        best = heapq.nsmallest(width, self._level, key=lambda index: (-self.nodes[index].value, index))
        return sorted(index + 1 for index in best)

    def draft(self, limit: int = MAX_NODES) -> TreeRows:
        """Return the most valuable nodes, at most `limit`."""
        return ranked(
            [node.token for node in self.nodes],
            [node.parent for node in self.nodes],
            [node.probability for node in self.nodes],
            limit,
        )


def ranked(
    tokens: Sequence[int], parents: Sequence[int], probabilities: Sequence[float], limit: int = MAX_NODES
) -> TreeRows:
    """Return the draft with its nodes in descending order of value, at most `limit`. A parent precedes its children, so
    that for any number of nodes the first ones are the most valuable tree of this size.

    Args:
        tokens: draft tokens in topological order.
        parents: row of each token's parent.
        probabilities: probability of each token after its path.
        limit: maximum number of nodes.
    """
    values = values_of(parents, probabilities)
    order = sorted(range(len(tokens)), key=lambda index: (-values[index], index))[:limit]
    rows = {0: 0} | {index + 1: row for row, index in enumerate(order, 1)}
    above = tuple(rows[parents[index]] for index in order)
    return TreeRows(
        tuple(tokens[index] for index in order),
        () if is_chain(above) else above,
        tuple(probabilities[index] for index in order),
    )


def values_of(parents: Sequence[int], probabilities: Sequence[float]) -> list[float]:
    """Return the product of the probabilities on the path of each draft token.

    Args:
        parents: row of each token's parent; empty for a chain.
        probabilities: probability of each token after its path, at most 1.
    """
    values = [1.0]
    for parent, probability in zip(parents or range(len(probabilities)), probabilities, strict=True):
        values.append(values[parent] * probability)
    return values[1:]


def product_tree(levels: Sequence[Sequence[Candidate]], limit: int = MAX_NODES) -> TreeRows:
    """Return the most valuable nodes of a tree in which all nodes of a depth have the same candidates, as those of
    Medusa heads (Cai et al., Medusa, 2024, section 3.1).

    Args:
        levels: candidates of each depth, by descending probability.
        limit: maximum number of nodes.
    """
    tree = GrowingTree()
    # Entries: value, parent row, depth, index of the candidate. A node's next sibling enters the heap with the node.
    heap = [(-levels[0][0][1], 0, 0, 0)] if levels and levels[0] else []
    while heap and len(tree.nodes) < limit:
        value, parent, depth, index = heapq.heappop(heap)
        token, share = levels[depth][index]
        tree.nodes.append(Node(token, parent, share, -value))
        if index + 1 < len(levels[depth]):
            heapq.heappush(heap, (value / share * levels[depth][index + 1][1], parent, depth, index + 1))
        if depth + 1 < len(levels) and levels[depth + 1]:
            heapq.heappush(heap, (value * levels[depth + 1][0][1], len(tree.nodes), depth + 1, 0))
    return tree.draft(limit)


def without(parents: Sequence[int], excluded: Collection[int]) -> tuple[list[int], tuple[int, ...]]:
    """Return the indices of the nodes that remain without some nodes and their descendants, and the parents of the
    remaining ones; the parents are empty for a chain.

    Args:
        parents: row of each node's parent.
        excluded: indices of nodes.
    """
    kept, rows = list[int](), {0: 0}
    for index, parent in enumerate(parents):
        if index not in excluded and parent in rows:
            kept.append(index)
            rows[index + 1] = len(kept)
    above = tuple(rows[parents[index]] for index in kept)
    return kept, () if is_chain(above) else above
