"""Paged KV memory of one engine: one contiguous range of pages in host memory or on a device.

    [pages][layers of a group][K, V][kv heads][block tokens][head dim]

With int8 and fp8, the scales of a head's tokens follow the quantized values; `kv.pages.layout` has the full
definition.

Most models have one group of all layers (`kv.pages.layer_groups`). A page is one contiguous range, and therefore one
transfer descriptor. The memory is allocated here, or is a buffer that a connector has registered or shared. Torch is
imported only if its kernels are used.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvferry.core.dtypes import CODED, ITEM_BYTES, SCALE_BYTES
from kvferry.core.errors import UsageError
from kvferry.engine.execute.tensors.device import CPU
from kvferry.kv.pages.layout import KvLayout

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

_ALIGNMENT = 4096


class PagedKv:
    """KV pages of one engine and their layout. Create it with `allocate` or `over`."""

    __slots__ = ("_memory", "_pages", "address", "device", "layout", "num_blocks", "page_layers", "places")

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        *,
        memory: npt.NDArray[np.uint8] | None = None,
        pages: "torch.Tensor | None" = None,
    ) -> None:
        """Exactly one of `memory` and `pages` must be set.

        Args:
            layout: layout of a page.
            num_blocks: number of pages.
            memory: host memory of all pages, `num_blocks * layout.block_bytes` bytes.
            pages: tensor on a device with all pages.
        """
        self.layout = layout
        self.num_blocks = num_blocks
        """Number of pages in the pool."""
        groups = layout.groups
        self.page_layers = groups.page_layers
        """Layers of a page."""
        self.places = np.array(groups.places if groups.is_divided else [], np.int64).reshape(-1, 2)
        """[layers, 2]: group of each layer, and its place in the group's pages; empty with one group."""
        self._memory = memory
        self._pages = pages
        self.device = CPU if pages is None else str(pages.device)
        """Device of the pages, as a torch device string."""
        self.address = 0 if memory is None else memory.ctypes.data
        """Address of the first page in host memory; 0 if the pages are on a device."""

    @classmethod
    def allocate(cls, layout: KvLayout, num_blocks: int, device: object = CPU) -> "PagedKv":
        """Allocate pages, and fault in their memory now, so that requests do not wait for page faults.

        Args:
            layout: layout of each page.
            num_blocks: number of pages.
            device: a torch device or its name.
        """
        if str(device) != CPU:
            import torch

            there = torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8, device=str(device))
            return cls(layout, num_blocks, pages=_pages_of(there, num_blocks, layout))
        size = num_blocks * layout.block_bytes
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        memory = memory[-memory.ctypes.data % _ALIGNMENT :][:size]
        memory[:] = 0
        return cls(layout, num_blocks, memory=memory)

    @classmethod
    def over(cls, layout: KvLayout, buffer: "Buffer") -> "PagedKv":
        """Use an existing writable buffer as pages, as many as fit; the buffer's content stays unchanged.

        Args:
            layout: layout of one page.
            buffer: writable contiguous memory.

        Raises:
            UsageError: the buffer is smaller than one page.
        """
        num_blocks = memoryview(buffer).nbytes // layout.block_bytes
        if num_blocks == 0:
            raise UsageError(
                f"a buffer of {memoryview(buffer).nbytes} bytes is smaller than a page of {layout.block_bytes} bytes",
                field="num_blocks",
            )
        memory = np.frombuffer(memoryview(buffer), np.uint8, count=num_blocks * layout.block_bytes)
        return cls(layout, num_blocks, memory=memory)

    @property
    def pages(self) -> "torch.Tensor":
        """All pages as one tensor [pages, layers, 2, kv heads, block tokens, head dim]: contiguous, or the codes of
        `kernels.coded_pages`."""
        if self._pages is None:
            import torch

            assert self._memory is not None
            # Otherwise a first access in inference mode would restrict later uses of the tensor.
            with torch.inference_mode(mode=False):
                self._pages = _pages_of(torch.from_numpy(self._memory), self.num_blocks, self.layout)
        return self._pages

    @property
    def rows(self) -> "torch.Tensor":
        """The memory of all pages: [pages, block_bytes] uint8."""
        from kvferry.kernels.coded_pages import page_bytes

        return page_bytes(self.pages)

    def move_tokens(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy the keys and values of tokens, in all layers of their pages, one after the other.

        Args:
            moves: source and target KV slot of each token.
        """
        layout, dims = self.layout, self.layout.dims
        tokens, width = layout.block_tokens, layout.head_dim * ITEM_BYTES[layout.dtype]
        memory: Any = self.rows if self._memory is None else self._memory  # slices of both are assigned alike
        heads = memory.reshape(self.num_blocks, math.prod(dims[:3]), -1)
        spans = [(0, width)] if layout.dtype not in CODED else [(0, width), (tokens * width, SCALE_BYTES)]
        for source, target in moves:
            (block, own), (other, place) = divmod(source, tokens), divmod(target, tokens)
            for first, size in spans:
                kept = heads[block, :, first + own * size : first + (own + 1) * size]
                heads[other, :, first + place * size : first + (place + 1) * size] = kept


def _pages_of(memory: "torch.Tensor", num_blocks: int, layout: KvLayout) -> "torch.Tensor":
    """View uint8 memory as the pages of a layout."""
    import torch

    from kvferry.kernels.coded_pages import coded_pages

    if layout.dtype in CODED:
        return coded_pages(memory, num_blocks, layout.dims, layout.dtype)
    return memory.view(getattr(torch, layout.dtype)).view(num_blocks, *layout.dims)
