"""Reference block operations: gather and scatter, layout conversion, page digests.

Digest of a page, where word i is the i-th group of 32 bits of the page (little endian), and sums are modulo 2^64:

    lane s = sum over i of mix(word i + 2^32 * (i mod 2^31) + salt s)          s = 0, 1
    mix(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31

`mix` is the finalizer of SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA
2014). It is a bijection, so a change of one word changes both lanes; sums do not depend on the order, so a device can
compute them in parallel. Collisions can be constructed: the digest detects corruption, not forgery.
"""

import torch

from kvferry.kernels.block_moves import Overlay

SALTS = (0x243F6A8885A308D3, 0x13198A2E03707344)
"""Salts of the two lanes: leading hexadecimal digits of the fraction of pi."""
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def gather_blocks(pages: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    return pages[blocks]


def scatter_blocks(staged: torch.Tensor, pages: torch.Tensor, blocks: torch.Tensor) -> None:
    pages[blocks] = staged


def relayout_blocks(staged: torch.Tensor, pages: torch.Tensor, blocks: torch.Tensor, overlay: Overlay) -> torch.Tensor:
    theirs, ours = staged.shape[4], pages.shape[4]
    heads = slice(overlay.first_kv_head, overlay.first_kv_head + pages.shape[3])
    lost = torch.zeros(1, dtype=torch.int32, device=pages.device)
    for index, block in enumerate(blocks.tolist()):
        for place in range(ours):
            position = overlay.target_first + index * ours + place
            slot = position - overlay.staged_first
            if not 0 <= slot < len(staged) * theirs or position >= overlay.tokens:
                continue
            given = staged[slot // theirs, :, :, heads, slot % theirs]
            kept = given.to(pages.dtype)
            lost += int((given.isfinite() & ~kept.isfinite()).sum())
            pages[block, :, :, :, place] = kept
    return lost


def digest_blocks(pages: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    words = pages[blocks].flatten(1).view(torch.int32).long() & 0xFFFFFFFF
    place = (torch.arange(words.shape[1], device=pages.device) & 0x7FFFFFFF) << 32
    return torch.stack([_mix(words + place + signed(salt)).sum(1) for salt in SALTS], dim=1)


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift(z, 30)) * signed(MIX_1)
    z = (z ^ _shift(z, 27)) * signed(MIX_2)
    return z ^ _shift(z, 31)


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right logically, unlike torch's right shift, which is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def signed(word: int) -> int:
    """Convert 64 bits, a number from 0 to 2^64 - 1, to the int64 with the same bits."""
    return word - (1 << 64) if word >> 63 else word
