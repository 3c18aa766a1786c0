"""What a kernel must be given. Whoever gives something else hears of it before a launch, not from a device that died.

Checks look at what the host knows, shapes, strides, types and the plan's own arrays, and never ask the device.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry.core.errors import UsageError
from kvferry.kernels.gpu.device import why_not

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


class BadKernelInput(UsageError):
    """A tensor or a shape that a kernel does not take; `field` is the argument, `reason` the kind of fault."""

    reason = "KERNEL_INPUT"


def fault(name: str, reason: str, message: str) -> BadKernelInput:
    """An error that names the argument."""
    return BadKernelInput(f"{name}: {message}", field=name, reason=f"KERNEL_{reason}")


def ready(name: str, x: torch.Tensor, *others: torch.Tensor) -> None:
    """A kernel can run where `x` is, and the others are there too.

    Raises:
        BadKernelInput: it cannot (KERNEL_DEVICE).
    """
    if (reason := why_not(x.device)) is not None:
        raise fault(name, "DEVICE", reason)
    for other in others:
        if other.device != x.device:
            raise fault(name, "DEVICE", f"it is on {x.device}, something that goes with it on {other.device}")


def floats(name: str, x: torch.Tensor, *, like: torch.Tensor | None = None) -> None:
    """A type that kernels compute with, and the same as that of `like`.

    Raises:
        BadKernelInput: KERNEL_DTYPE.
    """
    if x.dtype not in FLOATS:
        known = ", ".join(str(d).removeprefix("torch.") for d in FLOATS)
        raise fault(name, "DTYPE", f"{x.dtype} is none of {known}")
    if like is not None and x.dtype != like.dtype:
        raise fault(name, "DTYPE", f"{x.dtype} goes with {like.dtype}; convert one of them")


def typed(name: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    """Exactly this type.

    Raises:
        BadKernelInput: KERNEL_DTYPE.
    """
    if x.dtype != dtype:
        raise fault(name, "DTYPE", f"it is {x.dtype} and must be {dtype}")


def dense(name: str, x: torch.Tensor) -> None:
    """The last dimension lies in memory value after value.

    Raises:
        BadKernelInput: KERNEL_STRIDES.
    """
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise fault(name, "STRIDES", f"its last dimension has stride {x.stride(-1)}; call contiguous() on it first")


def contiguous(name: str, x: torch.Tensor) -> None:
    """One stretch of memory.

    Raises:
        BadKernelInput: KERNEL_STRIDES.
    """
    if not x.is_contiguous():
        raise fault(name, "STRIDES", f"strides {x.stride()} of shape {tuple(x.shape)}; call contiguous() on it first")


def shaped(name: str, x: torch.Tensor, *shape: int) -> None:
    """Exactly this shape.

    Raises:
        BadKernelInput: KERNEL_SHAPE.
    """
    if tuple(x.shape) != shape:
        raise fault(name, "SHAPE", f"its shape is {tuple(x.shape)} and must be {shape}")


def head_dim(name: str, size: int) -> None:
    """Heads that the kernels can take: an even number of values, so that they rotate, and few enough for registers.

    Raises:
        BadKernelInput: KERNEL_HEAD_SIZE.
    """
    if size % 2 or not 2 <= size <= MAX_HEAD_DIM:
        raise fault(name, "HEAD_SIZE", f"heads of {size} values; even numbers from 2 to {MAX_HEAD_DIM} are supported")


def pool(name: str, pages: torch.Tensor) -> None:
    """Pages [pages, layers, 2, K, B, D], each head's tokens one stretch.

    Raises:
        BadKernelInput: KERNEL_SHAPE, KERNEL_DTYPE, KERNEL_HEAD_SIZE or KERNEL_STRIDES.
    """
    if pages.ndim != 6 or pages.shape[2] != 2:
        raise fault(name, "SHAPE", f"{tuple(pages.shape)} are no pages [pages, layers, 2, K, B, D]")
    floats(name, pages)
    head_dim(name, pages.shape[5])
    dense(name, pages)


def tables(tables: npt.NDArray[np.int64], contexts: npt.NDArray[np.int64], pages: torch.Tensor) -> None:
    """Every sequence's context has pages in its table, and these are in the pool.

    Raises:
        BadKernelInput: KERNEL_TABLE.
    """
    needed = -(-contexts // pages.shape[4])
    if int(needed.max(initial=0)) > tables.shape[1]:
        row = int(needed.argmax())
        raise fault(
            "block_tables",
            "TABLE",
            f"row {row} has room for {tables.shape[1]} blocks; {int(contexts[row])} tokens take {int(needed[row])}",
        )
    used: npt.NDArray[Any] = tables[np.arange(tables.shape[1]) < needed[:, None]]
    if len(used) and not 0 <= int(used.min()) <= int(used.max()) < pages.shape[0]:
        raise fault("block_tables", "TABLE", f"a page is not among the pool's 0 to {pages.shape[0] - 1}")
