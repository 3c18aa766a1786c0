"""Attention plan: divides a step's attention into tiles and partitions of keys, once for all layers.

A tile has up to `queries` rows of a sequence, each with the H / K heads that share a KV head, and a range of keys:

    tile rows    row 0: heads 0..g-1 | row 1: heads 0..g-1 | ..      rows of one small matrix, so that
    keys         begin ........ full ........ end                    each key is read once
                 all rows            some rows (masked)

Sequences with few rows (decode) have small tiles, and their keys are split into partitions, which are counted from the
beginning of the sequence, so that one long context occupies a whole GPU (Dao et al., Flash-Decoding, 2023);
`merge_parts` combines the partial results in order. The boundaries depend only on the sequence, so a row's result does
not depend on its batch.

All arrays of a plan are sent to the device in one copy.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import triton

from kvferry.kernels.batch import AttentionBatch, SingleRows, Trees
from kvferry.kernels.gpu import check
from kvferry.kernels.gpu.launch import Choice, choose
from kvferry.kernels.ops import AttentionPlan

Ints = npt.NDArray[np.int64]
_ALIGNED = 4
"""Alignment in elements of each array, since Triton recompiles a kernel if the alignment of a pointer changes."""


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Tiles with the same number of rows, which one launch computes."""

    choice: Choice
    rows: int
    """Number of rows of a tile's matrix: queries times heads, padded to a power of two."""
    partition: int
    """Keys per partition; 0 if the tiles are not partitioned."""
    count: int
    numbers: torch.Tensor
    """[5, count] int32, per tile: row of the block tables, index of the tile's first row in `listed`, number of its
    rows in `listed`, and the key positions full, end."""
    listed: torch.Tensor
    """[..] int32: rows of all tiles, as indices into `members`."""


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """Rows of the batch that a set of tiles computes."""

    count: int
    rows: torch.Tensor
    """[count] int32: indices of the rows in the batch."""


@dataclass(frozen=True, slots=True, eq=False)
class TreeRows:
    """Trees of draft tokens, by row."""

    roots: torch.Tensor
    """[T] int32: place of the root of a row's tree in the context; beyond all contexts without a tree."""
    paths: torch.Tensor
    """[T] int64: tokens of the tree to which a row attends, as bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Attention plan of a step, shared by the launches of all layers."""

    num_rows: int
    num_heads: int
    shape: tuple[int, ...]
    """Shape of a page, [layers, 2, K, B, D] or [layers, 1, 1, B, D]."""
    tables: torch.Tensor
    """Block tables, [sequences, blocks] int32."""
    positions: torch.Tensor
    """Position of each row, [T] int32."""
    large: Tiles | None
    large_members: Members | None
    small: Tiles | None
    """Partitioned tiles."""
    small_members: Members | None
    num_partitions: int
    """Number of partitions of the longest context among the small members; an upper bound if lengths are only on the
    device."""
    is_open: bool = False
    """Whether context lengths are only on the device. A launch then has fewer programs than possible partitions."""
    trees: TreeRows | None = None
    """Rows of trees; `None` without any."""


@dataclass(slots=True)
class _Upload:
    """Collection of arrays that are sent to the device in one copy."""

    parts: list[Ints] = field(default_factory=list)
    used: int = 0

    def add(self, numbers: Ints) -> slice:
        flat = numbers.reshape(-1)
        padding = -len(flat) % _ALIGNED
        self.parts += [flat, np.zeros(padding, np.int64)]
        self.used += len(flat) + padding
        return slice(self.used - len(flat) - padding, self.used - padding)

    def send(self, device: torch.device) -> torch.Tensor:
        numbers = torch.from_numpy(np.concatenate(self.parts).astype(np.int32))
        if device.type == "cpu":
            return numbers
        return numbers.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Tiles on the host, before the copy to the device."""

    choice: Choice
    rows: int
    partition: int
    numbers: Ints
    listed: Ints


def plan_attention(batch: AttentionBatch, pages: torch.Tensor, num_heads: int) -> AttentionPlan:
    """See `Ops.plan_attention`.

    Raises:
        BadKernelInput: the pages are not supported, or a block table is too short for its context.
    """
    check.ready("pages", pages)
    check.pool("pages", pages)
    queries, contexts = batch.queries, batch.contexts
    if (len(queries) and int((contexts - queries).min()) < 0) or int(queries.min(initial=1)) < 1:
        raise check.fault(
            "queries", "SHAPE", "every sequence must have at least 1 row and at most as many rows as its context length"
        )
    check.tables(batch.block_tables, contexts, pages)
    if batch.trees is not None and pages.shape[2] == 1:
        raise check.fault("trees", "SHAPE", "the Triton kernels do not support trees of draft tokens in latent vectors")
    trees = np.zeros(len(queries), np.int64) if batch.trees is None else batch.trees.sizes
    starts = np.cumsum(queries) - queries
    num_rows = int(queries.sum())
    owner = np.repeat(np.arange(len(queries)), queries)
    positions = np.arange(num_rows) + np.repeat(contexts - queries - starts, queries)

    small_choice, small_rows, small_limit = _sizes("small", num_heads, pages)
    is_small = queries <= small_limit
    small, large = np.flatnonzero(is_small), np.flatnonzero(~is_small)
    small_members, large_members = np.flatnonzero(is_small[owner]), np.flatnonzero(~is_small[owner])

    cuts: list[_Cut] = []
    partition = small_choice.sizes["partition"]
    if len(small):
        numbers = _tiles(small, queries, contexts, small_limit, trees)
        cuts.append(_Cut(small_choice, small_rows, partition, numbers, np.arange(len(small_members))))
    if len(large):
        choice, rows, limit = _sizes("large", num_heads, pages)
        numbers = _tiles(large, queries, contexts, limit, trees)
        heaviest = np.argsort(-numbers[4], kind="stable")  # largest tiles first, to balance the load
        cuts.append(_Cut(choice, rows, 0, numbers[:, heaviest], np.arange(len(large_members))))

    upload = _Upload()
    tables = upload.add(batch.block_tables)
    at_positions, at_small, at_large = (upload.add(part) for part in (positions, small_members, large_members))
    placed = [(cut, upload.add(cut.numbers), upload.add(cut.listed)) for cut in cuts]
    sent = upload.send(pages.device)
    tiles = [
        Tiles(c.choice, c.rows, c.partition, c.numbers.shape[1], sent[numbers].view(5, -1), sent[listed])
        for c, numbers, listed in placed
    ]
    return Plan(
        num_rows=num_rows,
        num_heads=num_heads,
        shape=tuple(pages.shape[1:]),
        tables=sent[tables].view(batch.block_tables.shape),
        positions=sent[at_positions],
        large=next((t for t in tiles if not t.partition), None),
        large_members=Members(len(large_members), sent[at_large]) if len(large) else None,
        small=next((t for t in tiles if t.partition), None),
        small_members=Members(len(small_members), sent[at_small]) if len(small) else None,
        num_partitions=-(-int(contexts[small].max(initial=0)) // partition),
        trees=None if batch.trees is None else _tree_rows(batch.trees, contexts, owner, pages.device),
    )


def _tree_rows(trees: Trees, contexts: Ints, owner: Ints, device: torch.device) -> TreeRows:
    roots = np.where(trees.sizes > 0, contexts - trees.sizes, np.iinfo(np.int32).max)[owner]
    return TreeRows(torch.from_numpy(roots.astype(np.int32)).to(device), torch.from_numpy(trees.paths).to(device))


def plan_rows(rows: SingleRows, pages: torch.Tensor, num_heads: int) -> AttentionPlan:
    """See `DeviceOps.plan_rows`. The plan is computed on the device by launches that can be captured.

    Raises:
        BadKernelInput: the pages are not supported, or dtypes or devices of the rows are wrong.
    """
    check.ready("pages", pages, rows.tables, rows.places, rows.contexts)
    check.pool("pages", pages)
    check.typed("tables", rows.tables, torch.int32)
    check.dense("tables", rows.tables)
    for name, part in (("places", rows.places), ("contexts", rows.contexts)):
        check.typed(name, part, torch.int64)
        check.shaped(name, part, len(rows.places))
    if not 1 <= rows.max_tokens <= rows.tables.shape[1] * pages.shape[4]:
        raise check.fault(
            "max_tokens", "TABLE", f"{rows.max_tokens} tokens exceed tables of {rows.tables.shape[1]} blocks"
        )
    choice, size, _ = _sizes("small", num_heads, pages)
    count, partition = len(rows.places), choice.sizes["partition"]
    listed = torch.arange(count, dtype=torch.int32, device=pages.device)
    contexts = rows.contexts.to(torch.int32)
    numbers = torch.stack((rows.places.to(torch.int32), listed, torch.ones_like(listed), contexts, contexts))
    return Plan(
        num_rows=count,
        num_heads=num_heads,
        shape=tuple(pages.shape[1:]),
        tables=rows.tables,
        positions=contexts - 1,
        large=None,
        large_members=None,
        small=Tiles(choice, size, partition, count, numbers, listed),
        small_members=Members(count, listed),
        num_partitions=-(-rows.max_tokens // partition),
        is_open=True,
    )


def _group(num_heads: int, pages: torch.Tensor) -> int:
    kv_heads = pages.shape[3]
    if num_heads < 1 or num_heads % kv_heads:
        raise check.fault("q", "SHAPE", f"{num_heads} query heads cannot share {kv_heads} KV heads evenly")
    group = num_heads // kv_heads
    if group > 128:
        raise check.fault("q", "SHAPE", f"{group} query heads per KV head; at most 128 are supported")
    return group


def _sizes(kind: str, num_heads: int, pages: torch.Tensor) -> tuple[Choice, int, int]:
    """Return the launch configuration of `small` or `large` tiles, the number of rows of a tile's matrix, and
    the maximum number of queries in a tile. With latent vectors, heads that exceed a tile's rows have their own tiles,
    and the shape class is the padded number of heads instead of the head dimension."""
    wide = f"{8 * pages.dtype.itemsize}bit"
    if pages.shape[2] == 1:
        if num_heads < 1:
            raise check.fault("q", "SHAPE", f"{num_heads} query heads; at least 1 is required")
        heads = triton.next_power_of_2(num_heads)
        choice = choose(f"latent_{kind}", pages.device, f"h{min(128, max(16, heads))}-{wide}")
        return choice, choice.sizes["rows"], max(1, choice.sizes["rows"] // heads)
    group = _group(num_heads, pages)
    choice = choose(f"attend_{kind}", pages.device, f"d{max(16, triton.next_power_of_2(pages.shape[5]))}-{wide}")
    rows = max(choice.sizes["rows"], triton.next_power_of_2(group))
    return choice, rows, rows // group


def _tiles(sequences: Ints, queries: Ints, contexts: Ints, limit: int, trees: Ints) -> Ints:
    """Split sequences into tiles of at most `limit` rows; return [5, tiles] in order. The tiles' rows are listed in the
    same order. All rows of a tree attend to the tokens up to its root."""
    each = -(-queries[sequences] // limit)
    owner = np.repeat(sequences, each)
    index = np.arange(int(each.sum())) - np.repeat(np.cumsum(each) - each, each)
    counts = np.minimum(limit, queries[owner] - index * limit)
    lowest = contexts[owner] - queries[owner] + index * limit
    first = np.cumsum(counts) - counts
    full = np.where(trees[owner] > 0, contexts[owner] - trees[owner], lowest) + 1
    return np.stack((owner, first, counts, full, lowest + counts))
