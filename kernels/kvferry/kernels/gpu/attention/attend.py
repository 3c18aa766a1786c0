"""Launches of paged attention: one for prefill rows, one for decode rows, and one that merges partitions. `plan`
divides the work; `tiles` contains the kernels.
"""

import torch
import triton

from kvferry.kernels.batch import AttentionRules
from kvferry.kernels.gpu import check
from kvferry.kernels.gpu.attention.merge import merge_parts
from kvferry.kernels.gpu.attention.plan import Members, Plan, Tiles
from kvferry.kernels.gpu.attention.tiles import attend_tiles
from kvferry.kernels.gpu.codes import of_pages
from kvferry.kernels.gpu.device import INTERPRETED
from kvferry.kernels.gpu.launch import choose
from kvferry.kernels.ops import AttentionPlan

_OPEN_PROGRAMS = 4096
"""Number of programs in a launch if context lengths are only on the device: several waves on any GPU, but few enough
that idle programs cost little. The value was not tuned by measurement."""


def paged_attention(
    q: torch.Tensor, pages: torch.Tensor, layer: int, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """See `Ops.paged_attention`.

    Raises:
        BadKernelInput: see `attend`.
    """
    return attend(q, pages, layer, plan, AttentionRules(scale))


def attend(
    q: torch.Tensor, pages: torch.Tensor, layer: int, plan: AttentionPlan, rules: AttentionRules
) -> torch.Tensor:
    """See `DeviceOps.attend`.

    Raises:
        BadKernelInput: queries, pages and plan do not match, or the rules are not supported.
    """
    assert isinstance(plan, Plan)
    _check(q, pages, plan, rules)
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    values, scales, kind = of_pages(pages)
    at_layer, scales = values.select(1, layer), scales.select(1, layer)
    if plan.large is not None and plan.large_members is not None:
        _launch(out, None, q, (at_layer, scales, kind), plan, plan.large, plan.large_members, rules)
    if plan.small is not None and plan.small_members is not None:
        parts = _parts(q, plan, plan.small_members)
        _launch(out, parts, q, (at_layer, scales, kind), plan, plan.small, plan.small_members, rules)
        _merge(out, parts, q, plan, plan.small, plan.small_members, rules)
    return out


def _check(q: torch.Tensor, pages: torch.Tensor, plan: Plan, rules: AttentionRules) -> None:
    check.ready("q", q, pages, plan.positions)
    check.activations("q", q, pages)
    check.dense("q", q)
    check.pool("pages", pages, planes=2)
    if tuple(pages.shape[1:]) != plan.shape:
        raise check.fault(
            "pages", "SHAPE", f"the pages have shape {tuple(pages.shape)}; the plan is for pages of {plan.shape}"
        )
    check.shaped("q", q, plan.num_rows, plan.num_heads, pages.shape[5])
    if rules.window is not None and rules.window < 1:
        raise check.fault("window", "SHAPE", f"the window must be at least 1 position, not {rules.window}")
    if rules.window is not None and plan.trees is not None:
        raise check.fault("window", "SHAPE", "the Triton kernels do not support trees of draft tokens with a window")
    if rules.sinks is not None:
        check.ready("sinks", rules.sinks, q)
        check.typed("sinks", rules.sinks, torch.float32)
        check.shaped("sinks", rules.sinks, plan.num_heads)
        check.contiguous("sinks", rules.sinks)


def _parts(q: torch.Tensor, plan: Plan, members: Members) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate buffers for partial results: values, and logarithms of the sums of weights."""
    shape = (members.count, plan.num_heads, plan.num_partitions)
    peaks = torch.empty(shape, dtype=torch.float32, device=q.device)
    return torch.empty(*shape, q.shape[2], dtype=torch.float32, device=q.device), peaks


def _launch(
    out: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor] | None,
    q: torch.Tensor,
    at_layer: tuple[torch.Tensor, torch.Tensor, int],
    plan: Plan,
    tiles: Tiles,
    members: Members,
    rules: AttentionRules,
) -> None:
    pages, scales, kind = at_layer
    head_dim, kv_heads = q.shape[2], pages.shape[2]
    values, peaks = parts or (out, out)
    tiles.choice.run(
        attend_tiles,
        (tiles.count, kv_heads, _programs(plan, tiles, kv_heads)),
        out,
        values,
        peaks,
        q,
        pages,
        scales,
        plan.tables,
        tiles.numbers,
        tiles.listed,
        members.rows,
        plan.positions,
        plan.positions if rules.sinks is None else rules.sinks,
        plan.positions if plan.trees is None else plan.trees.roots,
        plan.positions if plan.trees is None else plan.trees.paths,
        tiles.count,
        plan.num_partitions,
        plan.tables.stride(0),
        rules.scale,
        rules.soft_cap or 0.0,
        rules.window or 0,
        q.stride(0),
        q.stride(1),
        pages.stride(0),
        pages.stride(1),
        pages.stride(2),
        pages.stride(3),
        group=q.shape[1] // kv_heads,
        head_dim=head_dim,
        dim=max(16, triton.next_power_of_2(head_dim)),
        block_tokens=pages.shape[3],
        kind=kind,
        num_rows=tiles.rows,
        num_keys=tiles.choice.sizes["keys"],
        partition=tiles.partition,
        shares=plan.is_open,
        is_capped=rules.soft_cap is not None,
        is_windowed=rules.window is not None,
        has_trees=plan.trees is not None,
        has_sinks=rules.sinks is not None,
        precision="ieee" if q.dtype == torch.float32 else "tf32",
        widens=INTERPRETED and q.dtype == torch.bfloat16,
    )


def _programs(plan: Plan, tiles: Tiles, kv_heads: int) -> int:
    """Return the number of programs that share the partitions of a tile and KV head."""
    if not tiles.partition:
        return 1
    if not plan.is_open:
        return plan.num_partitions
    return min(plan.num_partitions, max(1, _OPEN_PROGRAMS // (tiles.count * kv_heads)))


def _merge(
    out: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor],
    q: torch.Tensor,
    plan: Plan,
    tiles: Tiles,
    members: Members,
    rules: AttentionRules,
) -> None:
    head_dim = q.shape[2]
    choice = choose("merge_parts", q.device)
    choice.run(
        merge_parts,
        (members.count, plan.num_heads),
        out,
        *parts,
        members.rows,
        plan.positions,
        plan.positions if rules.sinks is None else rules.sinks,
        plan.num_partitions,
        rules.window or 0,
        head_dim=head_dim,
        dim=triton.next_power_of_2(head_dim),
        partition=tiles.partition,
        block=choice.sizes["block"],
        is_windowed=rules.window is not None,
        has_sinks=rules.sinks is not None,
        skips_whole=False,
    )
