"""The KV pages of one engine: one tensor over one range of memory, page after page.

    [pages][layers][K, V][kv heads][block tokens][head dim]

All layers of a page are one contiguous range, so a page is one descriptor for whoever moves it. The memory is the
engine's own, or a buffer that a connector has registered or shares.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvferry.core.errors import UsageError
from kvferry.model.config import ModelConfig

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True)
class PageShape:
    """The five inner dimensions of a page and its element type."""

    num_layers: int
    num_kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, *, block_tokens: int, dtype: torch.dtype) -> "PageShape":
        """The shape that a model's pages have.

        Raises:
            UsageError: `block_tokens` is not positive.
        """
        if block_tokens <= 0:
            raise UsageError(f"block_tokens must be positive, not {block_tokens}", field="block_tokens")
        return cls(config.num_layers, config.num_kv_heads, block_tokens, config.head_dim, dtype)

    @property
    def dims(self) -> tuple[int, int, int, int, int]:
        """[layers, 2, kv heads, block tokens, head dim]."""
        return self.num_layers, 2, self.num_kv_heads, self.block_tokens, self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one page, all layers, keys and values."""
        layers, two, heads, tokens, dim = self.dims
        return layers * two * heads * tokens * dim * self.dtype.itemsize


class PagedKv:
    """Pages and their shape."""

    __slots__ = ("pages", "shape")

    def __init__(self, pages: torch.Tensor, shape: PageShape) -> None:
        self.pages = pages
        """[pages, layers, 2, kv heads, block tokens, head dim], contiguous."""
        self.shape = shape

    @classmethod
    def allocate(cls, shape: PageShape, num_blocks: int, device: torch.device | str = "cpu") -> "PagedKv":
        """Pages in memory of their own, all of it touched now so that serving never waits for the kernel."""
        pages = torch.empty((num_blocks, *shape.dims), dtype=shape.dtype, device=device)
        return cls(pages.zero_(), shape)

    @classmethod
    def over(cls, shape: PageShape, buffer: "Buffer") -> "PagedKv":
        """Pages over a writable buffer that someone else owns; as many as fit. The content stays as it is.

        Raises:
            UsageError: not even one page fits.
        """
        num_blocks = memoryview(buffer).nbytes // shape.block_bytes
        if num_blocks == 0:
            raise UsageError(
                f"a buffer of {memoryview(buffer).nbytes} bytes holds no page of {shape.block_bytes} bytes",
                field="num_blocks",
            )
        elements = num_blocks * shape.block_bytes // shape.dtype.itemsize
        flat = torch.frombuffer(buffer, dtype=shape.dtype, count=elements)
        return cls(flat.view(num_blocks, *shape.dims), shape)

    @property
    def num_blocks(self) -> int:
        """Pages in the pool."""
        return int(self.pages.shape[0])
