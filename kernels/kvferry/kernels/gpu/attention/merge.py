"""Kernel that merges the partitions of paged attention."""

import triton
import triton.language as tl

from kvferry.kernels.gpu.attention.tiles import LOG2E


@triton.jit(do_not_specialize=["num_partitions", "window"])
def merge_parts(
    out: tl.tensor,
    parts: tl.tensor,
    part_peaks: tl.tensor,
    members: tl.tensor,
    positions: tl.tensor,
    sinks: tl.tensor,
    num_partitions: tl.tensor,
    window: tl.tensor,
    head_dim: tl.constexpr,
    dim: tl.constexpr,
    partition: tl.constexpr,
    block: tl.constexpr,
    is_windowed: tl.constexpr,
    has_sinks: tl.constexpr,
    skips_whole: tl.constexpr,
) -> None:
    """Merge a row's partitions, weighted by log-sum-exp, in an order that does not depend on the batch. Grid:
    (members, H).

    (D + 1) * 4 bytes are read per partition, and D values are written. With `skips_whole`, rows whose first part has
    the logarithm infinity are skipped: their results are in `out`.
    """
    member = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    row = tl.load(members + member)
    position = tl.load(positions + row)
    last = (position + partition) // partition  # 0 for padding rows, whose position is -1
    low = 0
    if is_windowed:
        low = tl.maximum(position - window + 1, 0) // partition
    base = (member.to(tl.int64) * heads + head) * num_partitions
    if skips_whole:
        first = tl.load(part_peaks + base, mask=last > 0, other=0.0)
        if first == float("inf"):
            return
    at = tl.arange(0, dim)
    total = 0.0
    peak = float("-inf")
    values_sum = tl.zeros([dim], tl.float32)
    for start in range(low // block * block, last, block):
        cut = start + tl.arange(0, block)
        known = (cut >= low) & (cut < last)
        peaks = tl.load(part_peaks + base + cut, mask=known, other=float("-inf"))
        source = parts + (base + cut)[:, None] * head_dim + at[None, :]
        values = tl.load(source, mask=known[:, None] & (at < head_dim)[None, :], other=0.0)
        higher = tl.maximum(peak, tl.max(peaks, axis=0))
        reached = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(peaks - reached)
        shrink = tl.exp2(peak - reached)
        total = total * shrink + tl.sum(weights, axis=0)
        values_sum = values_sum * shrink + tl.sum(weights[:, None] * values, axis=0)
        peak = higher
    if has_sinks:
        sink = tl.load(sinks + head) * LOG2E
        higher = tl.maximum(peak, sink)
        total = total * tl.exp2(peak - higher) + tl.exp2(sink - higher)
        values_sum = values_sum * tl.exp2(peak - higher)
    total = tl.where(total > 0.0, total, 1.0)  # padding rows become zeros
    target = out + (row.to(tl.int64) * heads + head) * head_dim + at
    tl.store(target, (values_sum / total).to(out.dtype.element_ty), mask=at < head_dim)
