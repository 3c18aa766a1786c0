"""Pages of KV in 8 bits on a torch device: a view of the codes, and a view of their scales that is derived from it.

    [page][layer][K, V][kv head]   =   [token][value] codes, then [token] scales in float32, little-endian

`core.dtypes.CODED` defines the codes. Both views have the strides of the page, so that kernels compute the address of a
scale from the position of its codes.
"""

from collections.abc import Sequence

import torch

from kvferry.core.dtypes import SCALE_BYTES

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Torch's dtype of the codes by data type of KV."""


def coded_pages(memory: torch.Tensor, num_blocks: int, dims: Sequence[int], dtype: str) -> torch.Tensor:
    """View memory as codes: [pages, layers, 2, K, B, D] of int8 or float8_e4m3fn.

    Args:
        memory: contiguous uint8, `num_blocks` pages.
        num_blocks: number of pages.
        dims: shape of a page: (layers, 2, K, B, D).
        dtype: key of `CODES`.
    """
    layers, planes, heads, tokens, head_dim = dims
    head = tokens * (head_dim + SCALE_BYTES)
    strides = (layers * planes * heads * head, planes * heads * head, heads * head, head, head_dim, 1)
    return memory.view(-1).view(CODES[dtype]).as_strided((num_blocks, *dims), strides)


def is_coded(pages: torch.Tensor) -> bool:
    """Return whether pages are a view by `coded_pages`, whose dtype is int8 or float8_e4m3fn."""
    return pages.dtype in CODES.values()


def page_bytes(pages: torch.Tensor) -> torch.Tensor:
    """View whole pages, with the scales of codes, as bytes: [pages, bytes] uint8.

    Args:
        pages: contiguous, or a view by `coded_pages`.
    """
    if not is_coded(pages):
        return pages.flatten(1).view(torch.uint8)
    size = pages.stride(0)
    return pages.as_strided((len(pages), size), (size, 1)).view(torch.uint8)


def scales_of(pages: torch.Tensor) -> torch.Tensor:
    """View the scales of codes: [pages, layers, 2, K, B] float32.

    Args:
        pages: a view by `coded_pages`; B * D is a multiple of 4.
    """
    page, layer, plane, head, _, _ = (stride // SCALE_BYTES for stride in pages.stride())
    first = pages.shape[4] * pages.shape[5] // SCALE_BYTES
    floats = page_bytes(pages).view(torch.float32)
    return floats.as_strided(pages.shape[:5], (page, layer, plane, head, 1), floats.storage_offset() + first)
