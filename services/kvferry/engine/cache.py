"""The KV pages of one engine: one range of memory, page after page.

    [pages][layers][K, V][kv heads][block tokens][head dim]

In int8 the scales of a head's tokens stand behind their codes; `kv.layout` has the whole of it.

All layers of a page are one contiguous range, so a page is one descriptor for whoever moves it. The memory is the
engine's own, or a buffer that a connector has registered or shares. Who computes with torch sees it as a tensor; nobody
else waits for torch to load.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvferry.core.dtypes import row_bytes
from kvferry.core.errors import UsageError
from kvferry.engine.device import CPU
from kvferry.model.config import ModelConfig

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class PageShape:
    """The five inner dimensions of a page and its element type."""

    num_layers: int
    num_kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: str
    """A name of `core.dtypes`."""

    @classmethod
    def of(cls, config: ModelConfig, *, block_tokens: int, dtype: str) -> "PageShape":
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
        return layers * two * heads * tokens * row_bytes(self.dtype, dim)


class PagedKv:
    """Pages and their shape. Made by `allocate` or `over`."""

    __slots__ = ("_memory", "_pages", "address", "device", "num_blocks", "shape")

    def __init__(
        self,
        shape: PageShape,
        num_blocks: int,
        *,
        memory: npt.NDArray[np.uint8] | None = None,
        pages: "torch.Tensor | None" = None,
    ) -> None:
        """Of host memory, or of a tensor on some device: one of the two."""
        self.shape = shape
        self.num_blocks = num_blocks
        """Pages in the pool."""
        self._memory = memory
        self._pages = pages
        self.device = CPU if pages is None else str(pages.device)
        """Where they are, as torch names it."""
        self.address = 0 if memory is None else memory.ctypes.data
        """Of the first page in the host's memory; 0 on another device."""

    @classmethod
    def allocate(cls, shape: PageShape, num_blocks: int, device: object = CPU) -> "PagedKv":
        """Pages in memory of their own, all of it touched now so that serving never waits for the kernel.

        Args:
            shape: of each.
            num_blocks: how many.
            device: a device of torch or its name.
        """
        if str(device) != CPU:
            import torch

            dtype: torch.dtype = getattr(torch, shape.dtype)
            return cls(shape, num_blocks, pages=torch.zeros((num_blocks, *shape.dims), dtype=dtype, device=str(device)))
        size = num_blocks * shape.block_bytes
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        memory = memory[-memory.ctypes.data % _ALIGNMENT :][:size]
        memory[:] = 0
        return cls(shape, num_blocks, memory=memory)

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
        memory = np.frombuffer(memoryview(buffer), np.uint8, count=num_blocks * shape.block_bytes)
        return cls(shape, num_blocks, memory=memory)

    @property
    def pages(self) -> "torch.Tensor":
        """[pages, layers, 2, kv heads, block tokens, head dim], contiguous. Not of int8: torch computes with none."""
        if self._pages is None:
            import torch

            assert self._memory is not None
            with torch.inference_mode(mode=False):  # else whoever asks first decides who may write
                flat = torch.from_numpy(self._memory).view(getattr(torch, self.shape.dtype))
                self._pages = flat.view(self.num_blocks, *self.shape.dims)
        return self._pages
