"""Page digest kernel: a 128-bit digest of each page, computed on the device. `reference.blocks` defines the digest."""

import torch
import triton
import triton.language as tl

from kvferry.kernels.gpu import check
from kvferry.kernels.gpu.blocks import words
from kvferry.kernels.gpu.launch import choose
from kvferry.kernels.reference.blocks import MIX_1, MIX_2, SALTS, signed

_MIX_1 = tl.constexpr(signed(MIX_1))
_MIX_2 = tl.constexpr(signed(MIX_2))


@triton.jit
def _mixed(z: tl.tensor) -> tl.tensor:
    """Apply the finalizer of SplitMix64 to int64 values, with logical shifts."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def _digest(
    sums: tl.tensor,
    pages: tl.tensor,
    blocks: tl.tensor,
    num_words: tl.tensor,
    page_stride: tl.tensor,
    salt_0: tl.tensor,
    salt_1: tl.tensor,
    turns: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Triton kernel of `digest_blocks`. Grid: (blocks, parts of a page). `sums` is [blocks, parts, 2] int64."""
    number = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    page = pages + tl.load(blocks + number) * page_stride
    first = tl.zeros([block], tl.int64)
    second = tl.zeros([block], tl.int64)
    for turn in range(turns):
        at = (part * turns + turn) * block + tl.arange(0, block)
        inside = at < num_words
        word = tl.load(page + at, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
        word = word + ((at.to(tl.int64) & 0x7FFFFFFF) << 32)
        first += tl.where(inside, _mixed(word + salt_0), 0)
        second += tl.where(inside, _mixed(word + salt_1), 0)
    target = sums + (number * tl.num_programs(1) + part) * 2
    tl.store(target, tl.sum(first, axis=0))
    tl.store(target + 1, tl.sum(second, axis=0))


def digest_blocks(pages: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """See `DeviceOps.digest_blocks`. Each page is read once.

    Raises:
        BadKernelInput: unsupported dtype, shape, stride or device.
    """
    check.ready("pages", pages, blocks)
    check.pool("pages", pages)
    check.whole_pages("pages", pages)
    check.typed("blocks", blocks, torch.int64)
    check.contiguous("blocks", blocks)
    page_words = words(pages)
    c = choose("digest_blocks", pages.device)
    block, turns = c.sizes["block"], c.sizes["turns"]
    parts = triton.cdiv(page_words.shape[1], block * turns)
    sums = torch.empty(len(blocks), parts, 2, dtype=torch.int64, device=pages.device)
    c.run(
        _digest, (len(blocks), parts), sums, page_words, blocks, page_words.shape[1], page_words.stride(0),
        *(signed(salt) for salt in SALTS), turns=turns, block=block,
    )  # fmt: skip
    return sums.sum(dim=1)
