"""Kernel of absorbed latent attention: online softmax of a tile of rows over latent vectors.

All heads attend to the same vectors (DeepSeek-AI, DeepSeek-V2, 2024, section 2.1), so a tile's matrix has a row per
query and head, and each vector is loaded once for all of them. A vector as a whole is a key; its first `rank` elements
are also the value:

    scores [rows, keys]  =  queries [rows, rank] x vectors' first part^T  +  rotated queries [rows, R] x rotated part^T
    result [rows, rank]  =  softmax(scores) x vectors' first part

Both products read the first part from the same tile in shared memory. It is loaded and accumulated in two halves,
because the results of one half at a time fit into the registers that storing them needs. The online softmax and what is
read of a page are as in `attention.tiles`.
"""

import triton
import triton.language as tl

from kvferry.kernels.gpu.attention.tiles import LOG2E, product


@triton.jit
def _one_part(
    out: tl.tensor,
    parts: tl.tensor,
    part_peaks: tl.tensor,
    left_queries: tl.tensor,
    right_queries: tl.tensor,
    turned_queries: tl.tensor,
    position: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    is_whole: tl.tensor,
    num_partitions: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    pages: tl.tensor,
    table: tl.tensor,
    page_stride: tl.tensor,
    token_stride: tl.tensor,
    scale: tl.tensor,
    rank: tl.constexpr,
    half: tl.constexpr,
    turned: tl.constexpr,
    turned_dim: tl.constexpr,
    block_tokens: tl.constexpr,
    num_rows: tl.constexpr,
    num_keys: tl.constexpr,
    partition: tl.constexpr,
    precision: tl.constexpr,
    widens: tl.constexpr,
) -> None:
    """Compute the vectors from `begin` to `end` for a tile, and store its result, or a partial result if the tile has
    several partitions."""
    factor = scale * LOG2E  # applied in the exponent, where it costs no instruction of its own
    total = tl.zeros([num_rows], tl.float32)
    peak = tl.full([num_rows], float("-inf"), tl.float32)
    left_sum = tl.zeros([num_rows, half], tl.float32)
    right_sum = tl.zeros([num_rows, half], tl.float32)
    at = tl.arange(0, half)[None, :]
    turned_at = tl.arange(0, turned_dim)[None, :]
    for start in range(begin, end, num_keys):
        token = start + tl.arange(0, num_keys)
        # Beyond the end, the last vector is read again, and its weight is 0: loads without a mask need fewer registers.
        there = tl.minimum(token, end - 1)
        page = tl.load(table + there // block_tokens)
        # Offsets need 64 bits, since a pool may have more than 2^31 values.
        source = (pages + page.to(tl.int64) * page_stride + (there % block_tokens) * token_stride)[:, None]
        if rank == 2 * half:
            left = tl.load(source + at)
            right = tl.load(source + (half + at))
        else:
            known = (there >= 0)[:, None]
            left = tl.load(source + at, mask=known & (at < rank), other=0.0)
            right = tl.load(source + (half + at), mask=known & (half + at < rank), other=0.0)
        if turned == turned_dim:
            turned_keys = tl.load(source + (rank + turned_at))
        else:
            inside = (there >= 0)[:, None] & (turned_at < turned)
            turned_keys = tl.load(source + (rank + turned_at), mask=inside, other=0.0)
        scores = product(left_queries, tl.trans(left), precision, widens)
        scores += product(right_queries, tl.trans(right), precision, widens)
        scores += product(turned_queries, tl.trans(turned_keys), precision, widens)
        seen = (token[None, :] <= position[:, None]) & (token < end)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1) * factor)
        reached = tl.where(higher == float("-inf"), 0.0, higher)  # -inf: no visible vector of the row so far
        weights = tl.exp2(scores * factor - reached[:, None])
        shrink = tl.exp2(peak - reached)
        total = total * shrink + tl.sum(weights, axis=1)
        weights = weights.to(left.dtype)
        left_sum = left_sum * shrink[:, None] + product(weights, left, precision, widens)
        right_sum = right_sum * shrink[:, None] + product(weights, right, precision, widens)
        peak = higher
    nothing = total == 0.0  # true for rows that end in an earlier partition
    some = tl.where(nothing, 1.0, total)
    share = 1.0 / some[:, None]
    is_left = is_row[:, None]
    is_right = is_row[:, None]
    if rank != 2 * half:
        is_left = is_left & (at < rank)
        is_right = is_right & (half + at < rank)
    if is_whole:
        whole = out + (rows * rank)[:, None] + at
        tl.store(whole, (left_sum * share).to(out.dtype.element_ty), mask=is_left)
        tl.store(whole + half, (right_sum * share).to(out.dtype.element_ty), mask=is_right)
        if partition:
            tl.store(part_peaks + rows * num_partitions, tl.full([num_rows], float("inf"), tl.float32), mask=is_row)
    else:
        place = rows * num_partitions
        tl.store(part_peaks + place, tl.where(nothing, float("-inf"), peak + tl.log2(some)), mask=is_row)
        kept = parts + (place * rank)[:, None] + at
        tl.store(kept, left_sum * share, mask=is_left)
        tl.store(kept + half, right_sum * share, mask=is_right)


@triton.jit(do_not_specialize=["num_tiles", "num_partitions", "table_stride", "head_tiles"])
def attend_tiles(
    out: tl.tensor,
    parts: tl.tensor,
    part_peaks: tl.tensor,
    absorbed: tl.tensor,
    turned_q: tl.tensor,
    pages: tl.tensor,
    tables: tl.tensor,
    tiles: tl.tensor,
    listed: tl.tensor,
    members: tl.tensor,
    positions: tl.tensor,
    num_tiles: tl.tensor,
    num_partitions: tl.tensor,
    table_stride: tl.tensor,
    head_tiles: tl.tensor,
    scale: tl.tensor,
    heads: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    page_stride: tl.tensor,
    token_stride: tl.tensor,
    group: tl.constexpr,
    rank: tl.constexpr,
    half: tl.constexpr,
    turned: tl.constexpr,
    turned_dim: tl.constexpr,
    block_tokens: tl.constexpr,
    num_rows: tl.constexpr,
    num_keys: tl.constexpr,
    partition: tl.constexpr,
    shares: tl.constexpr,
    precision: tl.constexpr,
    widens: tl.constexpr,
) -> None:
    """Compute latent attention for tiles of rows. Grid: (tiles * head tiles, programs that share a tile's partitions,
    or 1 if tiles are not partitioned). Head tiles over the same vectors are adjacent in the grid, so that all but one
    of them read the vectors from the cache.

    Each program reads its vectors once, rank + R values per token. It writes `rank` values per row, or rank + 1 float32
    values per row and partition.

    Args:
        out: [T, H, rank], dense; written for tiles with one partition.
        parts: [members, H, partitions, rank] float32: partial results of tiles with several partitions, each divided by
            its sum of weights.
        part_peaks: [members, H, partitions] float32: logarithm to base 2 of each part's sum of weights; infinity in a
            row's first part marks a result in `out`.
        absorbed: [T, H, rank], dense: queries for the first part of vectors.
        turned_q: [T, H, R], strided: rotated elements of queries.
        pages: pages of the layer, [pages, 1, 1, B, rank + R], strided.
        tables: [sequences, blocks] int32.
        tiles: [6, tiles] int32; see `plan.Tiles.numbers`. The rows of a tile are consecutive rows of the batch.
        listed: [..] int32.
        members: [..] int32.
        positions: [T] int32.
        group: heads of a tile, a power of two.
        half: half of the padded rank.
        partition: vectors per partition; 0 if tiles are not partitioned.
        shares: whether a program computes several partitions of its tile instead of one.
    """
    tile = tl.program_id(0) // head_tiles
    table = tl.load(tiles + tile)
    first = tl.load(tiles + num_tiles + tile)
    count = tl.load(tiles + 2 * num_tiles + tile)
    end = tl.load(tiles + 4 * num_tiles + tile)
    begin = tl.program_id(1) * partition
    if begin >= end:
        return

    member = tl.load(listed + first)
    batch_row = tl.load(members + member)
    row = tl.arange(0, num_rows)
    head = tl.program_id(0) % head_tiles * group + row % group
    is_row = (row // group < count) & (head < heads)
    position = tl.load(positions + batch_row) + row // group
    rows = row // group * heads + head
    out += batch_row.to(tl.int64) * heads * rank
    absorbed += batch_row.to(tl.int64) * heads * rank
    turned_q += batch_row.to(tl.int64) * row_stride
    at = tl.arange(0, half)[None, :]
    source = absorbed + (rows * rank)[:, None] + at
    left_queries = tl.load(source, mask=is_row[:, None] & (at < rank), other=0.0)
    right_queries = tl.load(source + half, mask=is_row[:, None] & (half + at < rank), other=0.0)
    turned_at = tl.arange(0, turned_dim)[None, :]
    source = turned_q + (row // group * row_stride + head * head_stride)[:, None] + turned_at
    turned_queries = tl.load(source, mask=is_row[:, None] & (turned_at < turned), other=0.0)

    tables += table.to(tl.int64) * table_stride
    if partition:
        part_peaks += member.to(tl.int64) * heads * num_partitions
        parts += member.to(tl.int64) * heads * num_partitions * rank
        is_whole = end <= partition
        if shares:
            for start in range(begin, end, tl.num_programs(1) * partition):
                cut = start // partition
                _one_part(
                    out, parts + cut * rank, part_peaks + cut, left_queries, right_queries, turned_queries, position,
                    rows, is_row, is_whole, num_partitions, start, tl.minimum(end, start + partition), pages, tables,
                    page_stride, token_stride, scale, rank, half, turned, turned_dim, block_tokens, num_rows, num_keys,
                    partition, precision, widens,
                )  # fmt: skip
        else:
            cut = tl.program_id(1)
            _one_part(
                out, parts + cut * rank, part_peaks + cut, left_queries, right_queries, turned_queries, position, rows,
                is_row, is_whole, num_partitions, begin, tl.minimum(end, begin + partition), pages, tables, page_stride,
                token_stride, scale, rank, half, turned, turned_dim, block_tokens, num_rows, num_keys, partition,
                precision, widens,
            )  # fmt: skip
    else:
        _one_part(
            out, parts, part_peaks, left_queries, right_queries, turned_queries, position, rows, is_row, True,
            num_partitions, 0, end, pages, tables, page_stride, token_stride, scale, rank, half, turned, turned_dim,
            block_tokens, num_rows, num_keys, partition, precision, widens,
        )  # fmt: skip
