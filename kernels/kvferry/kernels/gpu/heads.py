"""Fused kernel between projection and attention: head norms, rotary embedding, and KV writes to pages.

    qkv row    [ q0 .. q(H-1) | k0 .. k(K-1) | v0 .. v(K-1) ]
                 norm, rotate   norm, rotate
                 in place       └──── written to the row's KV slot ────┘

Without fusion, a decode step would read and write each row three times. `rotate` and `write_kv` are the separate
operations. The kernel that reshapes and writes blocks in one pass follows Kwon et al., Efficient memory management for
large language model serving with PagedAttention, 2023, section 5.1.
"""

import torch
import triton
import triton.language as tl

from kvferry.kernels.batch import HeadNorms
from kvferry.kernels.gpu import check, codes
from kvferry.kernels.gpu.launch import choose


@triton.jit
def turned(
    first: tl.tensor,
    second: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    size: tl.constexpr,
) -> tl.tensor:
    """Rotate both halves of a row's heads by the row's angles."""
    left = first * tl.load(cos + at, mask=inside, other=0.0) + second * tl.load(sin + at, mask=inside, other=0.0)
    cos += size
    sin += size
    right = second * tl.load(cos + at, mask=inside, other=0.0) + first * tl.load(sin + at, mask=inside, other=0.0)
    return left, right


@triton.jit
def _rotate(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    heads: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    size: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * tile + tl.arange(0, tile)[:, None]
    at = tl.arange(0, block)[None, :]
    inside = (head < heads) & (at < size)
    source = x + row * row_stride + head * head_stride + at
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
    angles = row * 2 * size
    left, right = turned(first, second, cos + angles, sin + angles, at, at < size, size)
    tl.store(source, left.to(x.dtype.element_ty), mask=inside)
    tl.store(source + size, right.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _place(
    qkv: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    epsilon: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    pages: tl.tensor,
    scales_at: tl.tensor,
    slots: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    page_stride: tl.tensor,
    value_stride: tl.tensor,
    page_head_stride: tl.tensor,
    token_stride: tl.tensor,
    block_tokens: tl.constexpr,
    kind: tl.constexpr,
    size: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
    norms: tl.constexpr,
    turns: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * tile + tl.arange(0, tile)[:, None]
    at = tl.arange(0, block)[None, :]
    inside = (head < heads + 2 * kv_heads) & (at < size)
    is_query = head < heads
    is_value = head >= heads + kv_heads
    source = qkv + row * row_stride + head * head_stride + at
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
    left, right = first, second
    if norms:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = (1.0 / tl.sqrt(squares / (2 * size) + epsilon))[:, None]
        known = at < size
        query_left = tl.load(query_norm + at, mask=known, other=0.0).to(tl.float32)
        query_right = tl.load(query_norm + size + at, mask=known, other=0.0).to(tl.float32)
        key_left = tl.load(key_norm + at, mask=known, other=0.0).to(tl.float32)
        key_right = tl.load(key_norm + size + at, mask=known, other=0.0).to(tl.float32)
        left = first * scale * tl.where(is_query, query_left, key_left)
        right = second * scale * tl.where(is_query, query_right, key_right)
    if turns:
        angles = row * 2 * size
        left, right = turned(left, right, cos + angles, sin + angles, at, at < size, size)
    left = tl.where(is_value, first, left).to(qkv.dtype.element_ty)
    right = tl.where(is_value, second, right).to(qkv.dtype.element_ty)
    tl.store(source, left, mask=inside & is_query)
    tl.store(source + size, right, mask=inside & is_query)
    slot = tl.load(slots + row).to(tl.int64)  # pools can have more than 2^31 values
    last_kept = tl.where(slot >= 0, heads + 2 * kv_heads, 0)  # padding rows write no keys and values
    is_kept = inside & (head >= heads) & (head < last_kept)
    kv_head = head - heads - tl.where(is_value, kv_heads, 0)
    target = pages + (slot // block_tokens) * page_stride + (slot % block_tokens) * token_stride
    target = target + tl.where(is_value, value_stride, 0) + kv_head * page_head_stride + at
    if kind:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
        scale, inverse = codes.code_steps(left, right, kind)
        place = (slot // block_tokens) * (page_stride // 4) + slot % block_tokens + kv_head * (page_head_stride // 4)
        place = place + tl.where(is_value, value_stride // 4, 0)
        is_row = (head >= heads) & (head < last_kept)
        tl.store(scales_at + place, scale[:, None], mask=is_row)
        left = codes.codes(left, inverse, kind)
        right = codes.codes(right, inverse, kind)
    tl.store(target, left, mask=is_kept)
    tl.store(target + size, right, mask=is_kept)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See `Ops.rotate`. T * heads * D values are read and written, and 8 T D bytes of angles are read.

    Raises:
        BadKernelInput: unsupported dtype, shape, stride or device.
    """
    check.ready("x", x, cos, sin)
    check.floats("x", x)
    check.dense("x", x)
    check_angles(x, cos, sin)
    rows, heads, head_dim = x.shape
    size = head_dim // 2
    c = choose("rotate", x.device)
    tile = min(c.sizes["tile"], triton.next_power_of_2(heads))
    c.run(
        _rotate,
        (rows, triton.cdiv(heads, tile)),
        x,
        cos,
        sin,
        heads,
        x.stride(0),
        x.stride(1),
        size=size,
        tile=tile,
        block=triton.next_power_of_2(size),
    )


def write_kv(kv: torch.Tensor, pages: torch.Tensor, layer: int, slots: torch.Tensor) -> None:
    """See `Ops.write_kv`. 2 T K D values are read and written.

    Args:
        kv: [T, 2, K, D]; each head is contiguous, and values follow keys at a distance of K times the stride of heads.
        pages: all pages of the pool, [pages, layers, 2, K, B, D].
        layer: index of the layer.
        slots: [T] int64.

    Raises:
        BadKernelInput: unsupported dtype, shape, stride or device.
    """
    if kv.ndim != 4:
        raise check.fault("kv", "SHAPE", f"the shape must be [T, 2, K, D], not {tuple(kv.shape)}")
    if kv.stride(1) != kv.shape[2] * kv.stride(2):
        raise check.fault("kv", "STRIDES", "keys and values are not adjacent; call contiguous() on the tensor first")
    _launch(kv.flatten(1, 2), None, None, pages, layer, slots)


def place_qkv(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
) -> None:
    """See `Ops.place_qkv`. T (H + 2 K) D values are read and written, and 8 T D bytes of angles are read. Values are
    not rounded between norm and rotation.

    Raises:
        BadKernelInput: unsupported dtype, shape, stride or device.
    """
    check_angles(qkv, cos, sin)
    if norms is not None:
        for name, weight in (("query norm", norms.query), ("key norm", norms.key)):
            check.ready(name, weight, qkv)
            check.floats(name, weight, like=qkv)
            check.shaped(name, weight, qkv.shape[2])
            check.contiguous(name, weight)
    _launch(qkv, norms, (cos, sin), pages, layer, slots)


def check_angles(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Check cosines and sines, each [T, D] float32, for heads [T, heads, D].

    Raises:
        BadKernelInput: unsupported dtype, shape, stride or device.
    """
    if x.ndim != 3:
        raise check.fault("x", "SHAPE", f"the shape must be [T, heads, D], not {tuple(x.shape)}")
    check.head_dim("x", x.shape[2])
    for name, angles in (("cos", cos), ("sin", sin)):
        check.ready(name, angles, x)
        check.typed(name, angles, torch.float32)
        check.shaped(name, angles, x.shape[0], x.shape[2])
        check.contiguous(name, angles)


def _launch(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    pages: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
) -> None:
    check.ready("qkv", qkv, pages, slots)
    check.pool("pages", pages, planes=2)
    check.activations("qkv", qkv, pages)
    check.dense("qkv", qkv)
    check.typed("slots", slots, torch.int64)
    check.shaped("slots", slots, qkv.shape[0])
    check.contiguous("slots", slots)
    rows, all_heads, head_dim = qkv.shape
    kv_heads = pages.shape[3]
    if head_dim != pages.shape[5] or all_heads < 2 * kv_heads:
        raise check.fault(
            "qkv", "SHAPE", f"the shape {tuple(qkv.shape)} does not match pages of shape {tuple(pages.shape[1:])}"
        )
    values, scales, kind = codes.of_pages(pages)
    at_layer = values.select(1, layer)
    c = choose("place_qkv", qkv.device)
    tile = min(c.sizes["tile"], triton.next_power_of_2(all_heads))
    cos, sin = angles or (slots, slots)
    c.run(
        _place,
        (rows, triton.cdiv(all_heads, tile)),
        qkv,
        slots if norms is None else norms.query,
        slots if norms is None else norms.key,
        0.0 if norms is None else norms.epsilon,
        cos,
        sin,
        at_layer,
        scales.select(1, layer),
        slots,
        all_heads - 2 * kv_heads,
        kv_heads,
        qkv.stride(0),
        qkv.stride(1),
        at_layer.stride(0),
        at_layer.stride(1),
        at_layer.stride(2),
        at_layer.stride(3),
        block_tokens=pages.shape[4],
        kind=kind,
        size=head_dim // 2,
        tile=tile,
        block=triton.next_power_of_2(head_dim // 2),
        norms=norms is not None,
        turns=angles is not None,
    )
