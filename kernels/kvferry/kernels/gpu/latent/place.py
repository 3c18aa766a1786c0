"""Kernel that writes latent vectors to pages: norm of the first part, rotation of the last, one store per value.

    vector [ v0 .. v(rank-1) | r0 .. r(R-1) ]
                norm             rotate          ──► the row's KV slot

The separate operations are three launches, and read and write the values twice.
"""

import torch
import triton
import triton.language as tl

from kvferry.kernels.gpu import check, heads
from kvferry.kernels.gpu.heads import turned
from kvferry.kernels.gpu.launch import choose


@triton.jit
def _place_vectors(
    vectors: tl.tensor,
    norm: tl.tensor,
    epsilon: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    pages: tl.tensor,
    slots: tl.tensor,
    row_stride: tl.tensor,
    page_stride: tl.tensor,
    token_stride: tl.tensor,
    rank: tl.constexpr,
    size: tl.constexpr,
    block_tokens: tl.constexpr,
    block: tl.constexpr,
    pairs: tl.constexpr,
    changes: tl.constexpr,
) -> None:
    """Write one vector of `rank` + 2 * `size` values. Grid: (rows). With `changes`, its parts are normalized and
    rotated; otherwise `rank` is the number of all values, and `size` is 0."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)  # pools can have more than 2^31 values
    if slot < 0:
        return  # padding rows are not written
    source = vectors + row * row_stride
    target = pages + (slot // block_tokens) * page_stride + (slot % block_tokens) * token_stride
    at = tl.arange(0, block)
    values = tl.load(source + at, mask=at < rank, other=0.0)
    if changes:
        values = values.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / rank + epsilon)
        values = values * scale * tl.load(norm + at, mask=at < rank, other=0.0).to(tl.float32)
        pair = tl.arange(0, pairs)
        inside = pair < size
        first = tl.load(source + rank + pair, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + rank + size + pair, mask=inside, other=0.0).to(tl.float32)
        angles = row * 2 * size
        left, right = turned(first, second, cos + angles, sin + angles, pair, inside, size)
        tl.store(target + rank + pair, left.to(pages.dtype.element_ty), mask=inside)
        tl.store(target + rank + size + pair, right.to(pages.dtype.element_ty), mask=inside)
    tl.store(target + at, values.to(pages.dtype.element_ty), mask=at < rank)


def write_kv(kv: torch.Tensor, pages: torch.Tensor, layer: int, slots: torch.Tensor) -> None:
    """See `Ops.write_kv`. Each value is read and written once.

    Raises:
        BadKernelInput: unsupported dtype, shape, stride or device.
    """
    if pages.ndim != 6 or pages.shape[2] != 1:
        heads.write_kv(kv, pages, layer, slots)
        return
    check.shaped("kv", kv, len(slots), 1, 1, pages.shape[5])
    _launch(kv.flatten(1), None, 0.0, None, pages, layer, slots)


def place_latent(
    vectors: torch.Tensor,
    norm: torch.Tensor,
    epsilon: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
) -> None:
    """See `Ops.place_latent`. T (rank + R) values are read and written, and 8 T R bytes of angles are read. Results
    equal those of the separate operations: each value is rounded once.

    Raises:
        BadKernelInput: unsupported dtype, shape, stride or device.
    """
    rank = norm.shape[-1]
    check.ready("norm", norm, vectors)
    check.floats("norm", norm, like=vectors)
    check.shaped("norm", norm, rank)
    check.contiguous("norm", norm)
    if vectors.ndim != 2 or rank >= vectors.shape[1]:
        raise check.fault("vectors", "SHAPE", f"the shape must be [T, {rank} + R], not {tuple(vectors.shape)}")
    heads.check_angles(vectors[:, None, rank:], cos, sin)
    _launch(vectors, norm, epsilon, (cos, sin), pages, layer, slots)


def _launch(
    vectors: torch.Tensor,
    norm: torch.Tensor | None,
    epsilon: float,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    pages: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
) -> None:
    check.ready("vectors", vectors, pages, slots)
    check.pool("pages", pages, planes=1)
    check.floats("vectors", vectors, like=pages)
    check.dense("vectors", vectors)
    check.typed("slots", slots, torch.int64)
    check.shaped("slots", slots, len(vectors))
    check.contiguous("slots", slots)
    width = pages.shape[5]
    check.shaped("vectors", vectors, len(slots), width)
    at_layer = pages.select(1, layer)
    rank = width if norm is None else len(norm)
    cos, sin = angles or (slots, slots)
    choose("place_latent", vectors.device).run(
        _place_vectors,
        (len(vectors),),
        vectors,
        slots if norm is None else norm,
        epsilon,
        cos,
        sin,
        at_layer,
        slots,
        vectors.stride(0),
        at_layer.stride(0),
        at_layer.stride(3),
        rank=rank,
        size=(width - rank) // 2,
        block_tokens=pages.shape[4],
        block=triton.next_power_of_2(rank),
        pairs=triton.next_power_of_2(max(1, (width - rank) // 2)),
        changes=norm is not None,
    )
