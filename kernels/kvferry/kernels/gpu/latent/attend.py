"""Launches of latent attention. All rows are computed absorbed: queries are multiplied by the projection of keys and
attend to the vectors themselves, and the results are multiplied by the projection of values.

Decode is bound by reading vectors, which this form reads once for all heads of a tile. Chunks of prompts take the same
kernel over pages in place, so that a chunk after cached tokens needs no other code and no memory for expanded keys and
values. A whole prompt would take fewer operations expanded: with 512 + 64 values per vector and heads of 128 + 64 and
128 values, 640 instead of 2,176 per head, row and token. `plan` divides the work as for other attention.
"""

import torch
import triton

from kvferry.kernels.batch import LatentUp
from kvferry.kernels.gpu import check
from kvferry.kernels.gpu.attention.merge import merge_parts
from kvferry.kernels.gpu.attention.plan import Members, Plan, Tiles
from kvferry.kernels.gpu.device import INTERPRETED
from kvferry.kernels.gpu.latent.tiles import attend_tiles
from kvferry.kernels.gpu.launch import choose
from kvferry.kernels.latent_limits import heads_at_once
from kvferry.kernels.ops import AttentionPlan

_OPEN_PROGRAMS = 1024
"""Number of programs in a launch if context lengths are only on the device: several waves on any GPU, since a program's
tiles fill half of a multiprocessor or more. The value was not tuned by measurement."""
_MIN_DIM = 16
"""Minimum size of each dimension of a product on tensor cores."""


def attend_latent(
    q: torch.Tensor, up: LatentUp, pages: torch.Tensor, layer: int, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """See `Ops.attend_latent`. Heads are computed in parts, so that intermediate results stay within the bound of
    `latent_limits.scratch_bytes`.

    Raises:
        BadKernelInput: queries, projections, pages and plan do not match, or are not supported.
    """
    assert isinstance(plan, Plan)
    _check(q, up, pages, plan)
    heads, plain, rank = up.keys.shape
    out = torch.empty(len(q), heads, up.values.shape[1], dtype=q.dtype, device=q.device)
    at_layer = pages.select(1, layer)
    step = heads_at_once(len(q), heads, rank=rank, value_bytes=q.dtype.itemsize)
    for first in range(0, heads, step):
        some = slice(first, first + step)
        rows = q[:, some]
        absorbed = torch.empty(*rows.shape[:2], rank, dtype=q.dtype, device=q.device)
        torch.bmm(rows[..., :plain].transpose(0, 1), up.keys[some], out=absorbed.transpose(0, 1))
        seen = attend_vectors(absorbed, rows[..., plain:], at_layer, plan, scale)
        torch.bmm(seen.transpose(0, 1), up.values[some].transpose(1, 2), out=out[:, some].transpose(0, 1))
    return out.flatten(1)


def attend_vectors(
    absorbed: torch.Tensor, turned: torch.Tensor, pages: torch.Tensor, plan: Plan, scale: float
) -> torch.Tensor:
    """Attend to latent vectors. A row's result does not depend on its batch.

    Args:
        absorbed: [T, heads, rank], dense: queries for the first part of vectors, of some or all heads of the plan.
        turned: [T, heads, R]: rotated elements of queries.
        pages: pages of the layer, [pages, 1, 1, B, rank + R].
        plan: see `plan_attention` and `plan_rows`.
        scale: factor of the scores.

    Returns:
        [T, heads, rank]: weighted sums of the vectors' first parts.
    """
    out = torch.empty_like(absorbed)
    if plan.large is not None and plan.large_members is not None:
        _launch(out, None, absorbed, turned, pages, plan, plan.large, plan.large_members, scale)
    if plan.small is not None and plan.small_members is not None:
        parts = None
        if plan.is_open or plan.num_partitions > 1:
            shape = (plan.small_members.count, absorbed.shape[1], plan.num_partitions)
            peaks = torch.empty(shape, dtype=torch.float32, device=out.device)
            parts = torch.empty(*shape, absorbed.shape[2], dtype=torch.float32, device=out.device), peaks
        _launch(out, parts, absorbed, turned, pages, plan, plan.small, plan.small_members, scale)
        if parts is not None:
            _merge(out, parts, plan, plan.small, plan.small_members)
    return out


def _check(q: torch.Tensor, up: LatentUp, pages: torch.Tensor, plan: Plan) -> None:
    check.ready("q", q, pages, plan.positions, up.keys, up.values)
    check.pool("pages", pages, planes=1)
    check.floats("q", q, like=pages)
    check.dense("q", q)
    if tuple(pages.shape[1:]) != plan.shape:
        raise check.fault(
            "pages", "SHAPE", f"the pages have shape {tuple(pages.shape)}; the plan is for pages of {plan.shape}"
        )
    for name, weight in (("keys", up.keys), ("values", up.values)):
        check.floats(name, weight, like=q)
        if weight.ndim != 3:
            raise check.fault(name, "SHAPE", f"the shape must be [H, values, rank], not {tuple(weight.shape)}")
    _, plain, rank = up.keys.shape
    check.shaped("keys", up.keys, plan.num_heads, plain, rank)
    check.shaped("values", up.values, plan.num_heads, up.values.shape[1], rank)
    turned = pages.shape[5] - rank
    if not 1 <= rank <= check.MAX_RANK or not 1 <= turned <= check.MAX_ROTATED:
        raise check.fault(
            "pages",
            "HEAD_SIZE",
            f"vectors have {rank} and {turned} rotated values; 1 to {check.MAX_RANK} and 1 to {check.MAX_ROTATED} are "
            "supported",
        )
    check.shaped("q", q, plan.num_rows, plan.num_heads, plain + turned)


def _launch(
    out: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor] | None,
    absorbed: torch.Tensor,
    turned: torch.Tensor,
    pages: torch.Tensor,
    plan: Plan,
    tiles: Tiles,
    members: Members,
    scale: float,
) -> None:
    """Launch tiles, with partitions if there is memory for parts."""
    _, heads, rank = absorbed.shape
    values, peaks = parts or (out, out)
    group = min(tiles.rows, triton.next_power_of_2(plan.num_heads))
    head_tiles = triton.cdiv(heads, group)
    tiles.choice.run(
        attend_tiles,
        (tiles.count * head_tiles, 1 if parts is None else _programs(plan, tiles.count * head_tiles)),
        out,
        values,
        peaks,
        absorbed,
        turned,
        pages,
        plan.tables,
        tiles.numbers,
        tiles.listed,
        members.rows,
        plan.positions,
        tiles.count,
        plan.num_partitions,
        plan.tables.stride(0),
        head_tiles,
        scale,
        heads,
        turned.stride(0),
        turned.stride(1),
        pages.stride(0),
        pages.stride(3),
        group=group,
        rank=rank,
        half=max(_MIN_DIM, triton.next_power_of_2(rank) // 2),
        turned=turned.shape[2],
        turned_dim=max(_MIN_DIM, triton.next_power_of_2(turned.shape[2])),
        block_tokens=pages.shape[3],
        num_rows=tiles.rows,
        num_keys=tiles.choice.sizes["keys"],
        partition=0 if parts is None else tiles.partition,
        shares=plan.is_open,
        precision="ieee" if out.dtype == torch.float32 else "tf32",
        widens=INTERPRETED and out.dtype == torch.bfloat16,
    )


def _programs(plan: Plan, tiles: int) -> int:
    """Return the number of programs that share the partitions of a tile."""
    if not plan.is_open:
        return plan.num_partitions
    return min(plan.num_partitions, max(1, _OPEN_PROGRAMS // tiles))


def _merge(
    out: torch.Tensor, parts: tuple[torch.Tensor, torch.Tensor], plan: Plan, tiles: Tiles, members: Members
) -> None:
    _, heads, rank = out.shape
    choice = choose("merge_parts", out.device, "latent")
    choice.run(
        merge_parts,
        (members.count, heads),
        out,
        *parts,
        members.rows,
        plan.positions,
        plan.positions,
        plan.num_partitions,
        0,
        head_dim=rank,
        dim=triton.next_power_of_2(rank),
        partition=tiles.partition,
        block=choice.sizes["block"],
        is_windowed=False,
        has_sinks=False,
        skips_whole=True,
    )
