"""Shape of a tree of draft tokens, and the walk that verifies it (Miao et al., SpecInfer, 2023, section 4; Cai et al.,
Medusa, 2024, section 3.1). Pure.

    row        0        1     2     3     4          the root is the last token of the sequence
    token      root     a     b     c     d
    parents             0     0     1     1          parents[i] is the row of the parent of row i + 1
    depth      0        1     1     2     2          position = position of the root + depth
    path       0        0 1   0 2   0 1 3 0 1 4      tokens of the tree to which the row attends

Rows are in topological order: a row's parent precedes it, so that the first rows of a tree are a tree.
"""

from collections.abc import Iterator, Sequence

Parents = Sequence[int]
"""Row of the parent of each draft token; see the module's docstring."""


def depths(parents: Parents) -> list[int]:
    """Return the depth of each row, the root included."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


def paths(parents: Parents) -> list[int]:
    """Return the path of each row as bits: bit i is set if row i is the row itself or one of its ancestors."""
    found = [1]
    for row, parent in enumerate(parents, 1):
        found.append(found[parent] | 1 << row)
    return found


def path_rows(parents: Parents, row: int) -> list[int]:
    """Return the draft rows from a child of the root to `row`, without the root; empty for the root."""
    found: list[int] = []
    while row:
        found.append(row)
        row = parents[row - 1]
    return found[::-1]


def is_chain(parents: Parents) -> bool:
    """Return whether each row is the parent of the next one."""
    return all(parent == row for row, parent in enumerate(parents))


def next_row(parents: Parents, tokens: Sequence[int], row: int, drawn: int) -> int | None:
    """Return the first child of a row whose token is the one that was drawn at the row; `None` without such a child.

    Args:
        parents: the tree.
        tokens: the draft tokens, one per entry of `parents`.
        row: the row at which a token was drawn.
        drawn: the drawn token.
    """
    for child in children(parents, row):
        if tokens[child - 1] == drawn:
            return child
    return None


def children(parents: Parents, row: int) -> Iterator[int]:
    """Yield the children of a row in order."""
    return (child for child, parent in enumerate(parents, 1) if parent == row)


def moves(path: Sequence[int]) -> list[tuple[int, int]]:
    """Return the moves of KV, (source row, target row), that put the rows of a path behind the root in order. Made one
    after the other, no move overwrites the source of a later one, since a path ascends.

    Args:
        path: draft rows of the path, without the root.
    """
    return [(source, target) for target, source in enumerate(path, 1) if source != target]
