"""Block copy kernels: gather and scatter with staging memory, layout conversion.

Pages are copied as 32-bit words, independent of the dtype. A page contains all layers in one contiguous range, so a
copy accesses whole cache lines (the third kernel of Kwon et al., PagedAttention, 2023, section 5.1, over block-major
pages).
"""

import torch
import triton
import triton.language as tl

from kvferry.kernels.block_moves import Overlay
from kvferry.kernels.coded_pages import page_bytes
from kvferry.kernels.gpu import check
from kvferry.kernels.gpu.launch import choose


@triton.jit
def _move(
    given: tl.tensor,
    wanted: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    words: tl.tensor,
    given_stride: tl.tensor,
    wanted_stride: tl.tensor,
    by_source: tl.constexpr,
    by_target: tl.constexpr,
    block: tl.constexpr,
) -> None:
    number = tl.program_id(0).to(tl.int64)
    source, target = number, number
    if by_source:
        source = tl.load(sources + number)
    if by_target:
        target = tl.load(targets + number)
    at = tl.program_id(1) * block + tl.arange(0, block)
    values = tl.load(given + source * given_stride + at, mask=at < words)
    tl.store(wanted + target * wanted_stride + at, values, mask=at < words)


def gather_blocks(pages: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """See `DeviceOps.gather_blocks`. Each page's bytes are read and written once.

    Raises:
        BadKernelInput: unsupported dtype, shape, stride or device.
    """
    check.floats("pages", pages)
    _check_blocks(pages, blocks)
    staged = torch.empty(len(blocks), *pages.shape[1:], dtype=pages.dtype, device=pages.device)
    _run(pages, staged, blocks, None)
    return staged


def scatter_blocks(staged: torch.Tensor, pages: torch.Tensor, blocks: torch.Tensor) -> None:
    """See `DeviceOps.scatter_blocks`. Each page's bytes are read and written once.

    Raises:
        BadKernelInput: unsupported dtype, shape, stride or device.
    """
    _check_blocks(pages, blocks)
    check.ready("staged", staged, pages)
    check.floats("pages", pages)
    check.floats("staged", staged, like=pages)
    check.shaped("staged", staged, len(blocks), *pages.shape[1:])
    check.contiguous("staged", staged)
    _run(staged, pages, None, blocks)


def _run(given: torch.Tensor, wanted: torch.Tensor, sources: torch.Tensor | None, targets: torch.Tensor | None) -> None:
    blocks = sources if sources is not None else targets
    assert blocks is not None
    one, other = words(given), words(wanted)
    c = choose("move_blocks", given.device)
    block = c.sizes["block"]
    c.run(
        _move,
        (len(blocks), triton.cdiv(one.shape[1], block)),
        one,
        other,
        blocks if sources is None else sources,
        blocks if targets is None else targets,
        one.shape[1],
        one.stride(0),
        other.stride(0),
        by_source=sources is not None,
        by_target=targets is not None,
        block=block,
    )


def words(pages: torch.Tensor) -> torch.Tensor:
    """View pages, with the scales of codes, as 32-bit words: [pages, words] int32."""
    return page_bytes(pages).view(torch.int32)


def _check_blocks(pages: torch.Tensor, *lists: torch.Tensor) -> None:
    check.pool("pages", pages)
    check.whole_pages("pages", pages)
    for blocks in lists:
        check.ready("blocks", blocks, pages)
        check.typed("blocks", blocks, torch.int64)
        check.contiguous("blocks", blocks)


@triton.jit(do_not_specialize=["staged_tokens", "from_target", "tokens"])
def _relay(
    lost: tl.tensor,
    given: tl.tensor,
    wanted: tl.tensor,
    blocks: tl.tensor,
    staged_tokens: tl.tensor,
    from_target: tl.tensor,
    tokens: tl.tensor,
    first_head: tl.tensor,
    given_page: tl.tensor,
    given_row: tl.tensor,
    wanted_page: tl.tensor,
    heads: tl.constexpr,
    theirs: tl.constexpr,
    ours: tl.constexpr,
    head_dim: tl.constexpr,
    dim: tl.constexpr,
    tile: tl.constexpr,
    is_checked: tl.constexpr,
) -> None:
    """Triton kernel of `relayout_blocks`. Grid: (target blocks, layers * planes * heads)."""
    number = tl.program_id(0)
    row = tl.program_id(1)
    page = tl.load(blocks + number)
    source_row = (row // heads) * given_row + first_head + row % heads
    at = tl.arange(0, dim)[None, :]
    for start in range(0, ours, tile):
        place = start + tl.arange(0, tile)
        slot = number * ours + place + from_target  # relative to the first staged slot
        inside = (place < ours) & (slot >= 0) & (slot < staged_tokens) & (slot < tokens)
        slot = tl.where(inside, slot, 0)
        source = given + (slot // theirs).to(tl.int64)[:, None] * given_page
        source = source + (source_row * theirs + slot % theirs)[:, None] * head_dim + at
        mask = inside[:, None] & (at < head_dim)
        values = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        if is_checked:  # 65504 is the largest float16; values below 65520 round to it
            is_lost = (tl.abs(values) >= 65520.0) & (tl.abs(values) < float("inf"))
            tl.atomic_add(lost, tl.sum(tl.sum(is_lost.to(tl.int32), axis=1), axis=0))
        target = wanted + page * wanted_page + (row * ours + place)[:, None] * head_dim + at
        tl.store(target, values.to(wanted.dtype.element_ty), mask=mask)


def relayout_blocks(staged: torch.Tensor, pages: torch.Tensor, blocks: torch.Tensor, overlay: Overlay) -> torch.Tensor:
    """See `DeviceOps.relayout_blocks`. Each common value is read and written once, with the conversion rules of
    `kv/pages/relayout.py`.

    Raises:
        BadKernelInput: unsupported dtype, shape, stride or device, or a required head is not staged.
    """
    check.floats("pages", pages)
    _check_blocks(pages, blocks)
    check.ready("staged", staged, pages)
    check.pool("staged", staged)
    check.contiguous("staged", staged)
    _, layers, planes, heads, ours, head_dim = pages.shape
    check.shaped("staged", staged, len(staged), layers, planes, staged.shape[3], staged.shape[4], head_dim)
    if not 0 <= overlay.first_kv_head <= staged.shape[3] - heads:
        raise check.fault(
            "staged",
            "SHAPE",
            f"it has {staged.shape[3]} heads; {heads} heads from index {overlay.first_kv_head} on are required",
        )
    lost = torch.zeros(1, dtype=torch.int32, device=pages.device)
    c = choose("relayout_blocks", pages.device)
    c.run(
        _relay,
        (len(blocks), layers * planes * heads),
        lost,
        staged,
        pages,
        blocks,
        staged.shape[0] * staged.shape[4],
        overlay.target_first - overlay.staged_first,
        overlay.tokens - overlay.staged_first,
        overlay.first_kv_head,
        staged.stride(0),
        staged.shape[3],
        pages.stride(0),
        heads=heads,
        theirs=staged.shape[4],
        ours=ours,
        head_dim=head_dim,
        dim=triton.next_power_of_2(head_dim),
        tile=c.sizes["tokens"],
        is_checked=pages.dtype == torch.float16 and staged.dtype != torch.float16,
    )
    return lost
