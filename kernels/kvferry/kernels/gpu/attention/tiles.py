"""Paged attention kernel: online softmax for a tile of rows over tiles of keys.

The online softmax follows Dao et al., FlashAttention, 2022 (algorithm 1), in powers of two; keys are read through a
block table as in Kwon et al., PagedAttention, 2023. Keys visible to all rows of the tile come first and need no mask.
Only keys from `full` to `end` are masked; rows of a tree attend to those of their paths. Unused table entries and
unfilled slots of a page, which are beyond `end`, are not read, since zero times NaN is NaN.

Sums are accumulated in float32. Products of float32 inputs use full float32 precision (`ieee`), not TF32.
"""

import triton
import triton.language as tl

from kvferry.kernels.gpu import codes

LOG2E = tl.constexpr(1.4426950408889634)
"""Logarithm of e to base 2, since weights are powers of two."""


@triton.jit
def product(a: tl.tensor, b: tl.tensor, precision: tl.constexpr, widens: tl.constexpr) -> tl.tensor:
    """Multiply matrices into float32; `widens` converts the inputs first, since the interpreter cannot multiply
    bfloat16."""
    if widens:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=precision)


@triton.jit
def _absorb(
    total: tl.tensor,
    peak: tl.tensor,
    values_sum: tl.tensor,
    queries: tl.tensor,
    position: tl.tensor,
    root: tl.tensor,
    path: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    pages: tl.tensor,
    scales_at: tl.tensor,
    table: tl.tensor,
    page_stride: tl.tensor,
    value_stride: tl.tensor,
    token_stride: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    head_dim: tl.constexpr,
    dim: tl.constexpr,
    block_tokens: tl.constexpr,
    kind: tl.constexpr,
    num_keys: tl.constexpr,
    is_capped: tl.constexpr,
    is_windowed: tl.constexpr,
    has_trees: tl.constexpr,
    is_masked: tl.constexpr,
    precision: tl.constexpr,
    widens: tl.constexpr,
) -> tl.tensor:
    """Accumulate a tile of keys into (sum of weights, maximum score, weighted values); with codes, the columns of the
    weighted values are those of `codes.deinterleaved_columns`."""
    token = start + tl.arange(0, num_keys)
    at = tl.arange(0, dim)
    if is_masked:
        page = tl.load(table + token // block_tokens, mask=token < end, other=0)
    else:
        page = tl.load(table + token // block_tokens)
    # Offsets need 64 bits, since a pool may have more than 2^31 values.
    source = pages + page.to(tl.int64)[:, None] * page_stride
    source = source + (token % block_tokens)[:, None] * token_stride + at[None, :]
    if is_masked:
        inside = (token < end)[:, None] & (at < head_dim)[None, :]
        keys = tl.load(source, mask=inside, other=0.0)
        values = tl.load(source + value_stride, mask=inside, other=0.0)
    elif dim != head_dim:
        inside = (token >= 0)[:, None] & (at < head_dim)[None, :]
        keys = tl.load(source, mask=inside, other=0.0)
        values = tl.load(source + value_stride, mask=inside, other=0.0)
    else:
        keys = tl.load(source)
        values = tl.load(source + value_stride)
    if kind:
        keys = codes.numbers(keys, kind, queries.dtype)
        values = codes.deinterleaved(codes.numbers(values, kind, queries.dtype), num_keys, dim)
    scores = product(queries, tl.trans(keys), precision, widens)
    if kind:
        scale_of = scales_at + page.to(tl.int64) * (page_stride // 4) + token % block_tokens
        scores = scores * tl.load(scale_of, mask=token < end, other=0.0)[None, :]
    if is_capped:
        bounded = 2.0 * scores * scale / soft_cap
        small = tl.exp2(-tl.abs(bounded) * LOG2E)  # for tanh(x / 2) without overflow
        tangent = (1.0 - small) / (1.0 + small)
        scores = tl.where(bounded >= 0, tangent, -tangent)
        factor = soft_cap * LOG2E
    else:
        factor = scale * LOG2E  # applied in the exponent below, where it costs no instruction of its own
    if is_masked:
        seen = (token[None, :] <= position[:, None]) & (token < end)[None, :]
        if is_windowed:
            seen = seen & (token[None, :] > position[:, None] - window)
        if has_trees:
            place = token[None, :] - root[:, None]
            bit = tl.minimum(tl.maximum(place, 0), 63).to(tl.int64)
            seen = seen & ((place < 0) | (((path[:, None] >> bit) & 1) != 0))
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1) * factor)
    reached = higher
    if is_masked:
        reached = tl.where(higher == float("-inf"), 0.0, higher)  # -inf: no visible key of the row so far
    weights = tl.exp2(scores * factor - reached[:, None])
    shrink = tl.exp2(peak - reached)
    total = total * shrink + tl.sum(weights, axis=1)
    if kind:
        weights = weights * tl.load(scale_of + value_stride // 4, mask=token < end, other=0.0)[None, :]
    values_sum = values_sum * shrink[:, None] + product(weights.to(values.dtype), values, precision, widens)
    return total, higher, values_sum


@triton.jit
def _over_keys(
    queries: tl.tensor,
    position: tl.tensor,
    root: tl.tensor,
    path: tl.tensor,
    begin: tl.tensor,
    full: tl.tensor,
    end: tl.tensor,
    pages: tl.tensor,
    scales_at: tl.tensor,
    tables: tl.tensor,
    page_stride: tl.tensor,
    value_stride: tl.tensor,
    token_stride: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    head_dim: tl.constexpr,
    dim: tl.constexpr,
    block_tokens: tl.constexpr,
    kind: tl.constexpr,
    num_rows: tl.constexpr,
    num_keys: tl.constexpr,
    is_capped: tl.constexpr,
    is_windowed: tl.constexpr,
    has_trees: tl.constexpr,
    precision: tl.constexpr,
    widens: tl.constexpr,
) -> tl.tensor:
    """Accumulate all keys from `begin` to `end`; return (sum of weights, maximum score, weighted values)."""
    total = tl.zeros([num_rows], tl.float32)
    peak = tl.full([num_rows], float("-inf"), tl.float32)
    values_sum = tl.zeros([num_rows, dim], tl.float32)
    masked_from = begin
    if not is_windowed:
        masked_from = begin + tl.maximum(tl.minimum(full, end) - begin, 0) // num_keys * num_keys
    for start in range(begin, masked_from, num_keys):
        total, peak, values_sum = _absorb(
            total, peak, values_sum, queries, position, root, path, start, end, pages, scales_at, tables, page_stride,
            value_stride, token_stride, scale, soft_cap, window, head_dim, dim, block_tokens, kind, num_keys, is_capped,
            is_windowed, has_trees, False, precision, widens,
        )  # fmt: skip
    for start in range(masked_from, end, num_keys):
        total, peak, values_sum = _absorb(
            total, peak, values_sum, queries, position, root, path, start, end, pages, scales_at, tables, page_stride,
            value_stride, token_stride, scale, soft_cap, window, head_dim, dim, block_tokens, kind, num_keys, is_capped,
            is_windowed, has_trees, True, precision, widens,
        )  # fmt: skip
    return total, peak, values_sum


@triton.jit
def _one_part(
    parts: tl.tensor,
    part_peaks: tl.tensor,
    member: tl.tensor,
    heads: tl.tensor,
    head: tl.tensor,
    num_partitions: tl.tensor,
    is_row: tl.tensor,
    is_value: tl.tensor,
    at: tl.tensor,
    queries: tl.tensor,
    position: tl.tensor,
    root: tl.tensor,
    path: tl.tensor,
    begin: tl.tensor,
    full: tl.tensor,
    end: tl.tensor,
    cut: tl.tensor,
    pages: tl.tensor,
    scales_at: tl.tensor,
    tables: tl.tensor,
    page_stride: tl.tensor,
    value_stride: tl.tensor,
    token_stride: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    head_dim: tl.constexpr,
    dim: tl.constexpr,
    block_tokens: tl.constexpr,
    kind: tl.constexpr,
    num_rows: tl.constexpr,
    num_keys: tl.constexpr,
    is_capped: tl.constexpr,
    is_windowed: tl.constexpr,
    has_trees: tl.constexpr,
    precision: tl.constexpr,
    widens: tl.constexpr,
) -> None:
    """Compute one partition of a tile and store its partial result."""
    total, peak, values_sum = _over_keys(
        queries, position, root, path, begin, full, end, pages, scales_at, tables, page_stride, value_stride,
        token_stride, scale, soft_cap, window, head_dim, dim, block_tokens, kind, num_rows, num_keys, is_capped,
        is_windowed, has_trees, precision, widens,
    )  # fmt: skip
    nothing = total == 0.0  # true if no keys of the partition are in the row's window
    some = tl.where(nothing, 1.0, total)
    place = (member.to(tl.int64) * heads + head) * num_partitions + cut
    tl.store(part_peaks + place, tl.where(nothing, float("-inf"), peak + tl.log2(some)), mask=is_row)
    tl.store(parts + place[:, None] * head_dim + at[None, :], values_sum / some[:, None], mask=is_value)


@triton.jit(do_not_specialize=["num_tiles", "num_partitions", "table_stride", "window"])
def attend_tiles(
    out: tl.tensor,
    parts: tl.tensor,
    part_peaks: tl.tensor,
    q: tl.tensor,
    pages: tl.tensor,
    scales_at: tl.tensor,
    tables: tl.tensor,
    tiles: tl.tensor,
    listed: tl.tensor,
    members: tl.tensor,
    positions: tl.tensor,
    sinks: tl.tensor,
    roots: tl.tensor,
    paths: tl.tensor,
    num_tiles: tl.tensor,
    num_partitions: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    page_stride: tl.tensor,
    value_stride: tl.tensor,
    page_head_stride: tl.tensor,
    token_stride: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    dim: tl.constexpr,
    block_tokens: tl.constexpr,
    kind: tl.constexpr,
    num_rows: tl.constexpr,
    num_keys: tl.constexpr,
    partition: tl.constexpr,
    shares: tl.constexpr,
    is_capped: tl.constexpr,
    is_windowed: tl.constexpr,
    has_trees: tl.constexpr,
    has_sinks: tl.constexpr,
    precision: tl.constexpr,
    widens: tl.constexpr,
) -> None:
    """Compute attention for tiles of rows. Grid: (tiles, KV heads, programs that share a tile's partitions, or 1 if
    tiles are not partitioned).

    The visible keys and values of each KV head are read once, 4 D bytes per token at 16 bits. D values are written per
    row and head, or D + 1 float32 values per partition.

    Args:
        out: [T, H * D]; written if tiles are not partitioned.
        parts: [members, H, partitions, D] float32; written if tiles are partitioned, each part divided by its sum of
            weights.
        part_peaks: [members, H, partitions] float32: logarithm to base 2 of each part's sum of weights.
        q: [T, H, D], strided.
        pages: pages of the layer, [pages, 2, K, B, D], strided.
        scales_at: scales of codes, [pages, 2, K, B] float32, strided like the pages; not read without codes.
        tables: [sequences, blocks] int32.
        tiles: [5, tiles] int32; see `plan.Tiles.numbers`.
        listed: [..] int32.
        members: [..] int32.
        positions: [T] int32.
        sinks: [H] float32.
        roots: [T] int32: position of the root of a row's tree; beyond all positions without a tree.
        paths: [T] int64: tokens of the tree to which a row attends, as bits.
        kind: kind of codes, a value of `codes.KIND_OF`; 0 without codes.
        partition: keys per partition; 0 if not partitioned.
        shares: whether a program computes several partitions of its tile instead of one.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    heads = tl.num_programs(1) * group
    table = tl.load(tiles + tile)
    first = tl.load(tiles + num_tiles + tile)
    count = tl.load(tiles + 2 * num_tiles + tile)
    full = tl.load(tiles + 3 * num_tiles + tile)
    end = tl.load(tiles + 4 * num_tiles + tile)
    begin = tl.full([], 0, tl.int32)
    if is_windowed:
        begin = tl.maximum(begin, (full - window) // num_keys * num_keys)
    begin_here = begin
    if partition:
        begin_here = (begin // partition + tl.program_id(2)) * partition
    if begin_here >= end:
        return

    row = tl.arange(0, num_rows)
    is_row = (row // group < count) & (row // group < num_rows // group)
    member = tl.load(listed + first + row // group, mask=is_row, other=0)
    batch_row = tl.load(members + member, mask=is_row, other=0)
    position = tl.load(positions + batch_row, mask=is_row, other=0)
    root = position
    path = position
    if has_trees:
        root = tl.load(roots + batch_row, mask=is_row, other=0)
        path = tl.load(paths + batch_row, mask=is_row, other=0)
    head = kv_head * group + row % group
    at = tl.arange(0, dim)
    source = q + batch_row.to(tl.int64)[:, None] * row_stride + head[:, None] * head_stride + at[None, :]
    queries = tl.load(source, mask=is_row[:, None] & (at < head_dim)[None, :], other=0.0)
    if kind:
        at = codes.deinterleaved_columns(dim)  # columns of the weighted values
    is_value = is_row[:, None] & (at < head_dim)[None, :]

    pages += kv_head * page_head_stride
    scales_at += kv_head * (page_head_stride // 4)
    tables += table.to(tl.int64) * table_stride
    if partition:
        if shares:  # a loop costs registers, so only launches that need it contain it
            for start in range(begin_here, end, tl.num_programs(2) * partition):
                _one_part(
                    parts, part_peaks, member, heads, head, num_partitions, is_row, is_value, at, queries, position,
                    root, path, tl.maximum(begin, start), full, tl.minimum(end, start + partition), start // partition,
                    pages, scales_at, tables, page_stride, value_stride, token_stride, scale, soft_cap, window,
                    head_dim, dim, block_tokens, kind, num_rows, num_keys, is_capped, is_windowed, has_trees, precision,
                    widens,
                )  # fmt: skip
        else:
            _one_part(
                parts, part_peaks, member, heads, head, num_partitions, is_row, is_value, at, queries, position, root,
                path, tl.maximum(begin, begin_here), full, tl.minimum(end, begin_here + partition),
                begin_here // partition, pages, scales_at, tables, page_stride, value_stride, token_stride, scale,
                soft_cap, window, head_dim, dim, block_tokens, kind, num_rows, num_keys, is_capped, is_windowed,
                has_trees, precision, widens,
            )  # fmt: skip
    else:
        total, peak, values_sum = _over_keys(
            queries, position, root, path, begin, full, end, pages, scales_at, tables, page_stride, value_stride,
            token_stride, scale, soft_cap, window, head_dim, dim, block_tokens, kind, num_rows, num_keys, is_capped,
            is_windowed, has_trees, precision, widens,
        )  # fmt: skip
        if has_sinks:
            sink = tl.load(sinks + head, mask=is_row, other=0.0) * LOG2E
            higher = tl.maximum(peak, sink)
            total = total * tl.exp2(peak - higher) + tl.exp2(sink - higher)
            values_sum = values_sum * tl.exp2(peak - higher)[:, None]
        total = tl.where(is_row, total, 1.0)
        target = out + (batch_row.to(tl.int64)[:, None] * heads + head[:, None]) * head_dim + at[None, :]
        tl.store(target, (values_sum / total[:, None]).to(out.dtype.element_ty), mask=is_value)
