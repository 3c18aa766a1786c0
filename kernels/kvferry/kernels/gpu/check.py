"""Argument checks of kernel wrappers: invalid input raises an error before the launch instead of causing a device
fault.

Checks use only data on the host (shapes, strides, dtypes and the plan's arrays) and never synchronize with the device.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry.core.errors import UsageError
from kvferry.kernels.coded_pages import is_coded
from kvferry.kernels.gpu.device import why_not
from kvferry.kernels.latent_limits import LATENT_LIMITS

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
MAX_RANK, MAX_ROTATED = LATENT_LIMITS


class BadKernelInput(UsageError):
    """An unsupported tensor or shape; `field` is the argument, `reason` the kind of fault."""

    reason = "KERNEL_INPUT"


def fault(name: str, reason: str, message: str) -> BadKernelInput:
    """Create the error for an argument."""
    return BadKernelInput(f"{name}: {message}", field=name, reason=f"KERNEL_{reason}")


def ready(name: str, x: torch.Tensor, *others: torch.Tensor) -> None:
    """Check that kernels can run on the device of `x`, and that the other tensors are on the same device.

    Raises:
        BadKernelInput: KERNEL_DEVICE.
    """
    if (reason := why_not(x.device)) is not None:
        raise fault(name, "DEVICE", reason)
    for other in others:
        if other.device != x.device:
            raise fault(name, "DEVICE", f"one argument is on {x.device}, another is on {other.device}")


def floats(name: str, x: torch.Tensor, *, like: torch.Tensor | None = None) -> None:
    """Check that the dtype is a supported floating-point dtype, equal to `like.dtype`.

    Raises:
        BadKernelInput: KERNEL_DTYPE.
    """
    if x.dtype not in FLOATS:
        known = ", ".join(str(d).removeprefix("torch.") for d in FLOATS)
        raise fault(name, "DTYPE", f"{x.dtype} is not one of {known}")
    if like is not None and x.dtype != like.dtype:
        raise fault(name, "DTYPE", f"{x.dtype} does not match {like.dtype}; convert one of them")


def activations(name: str, x: torch.Tensor, pages: torch.Tensor) -> None:
    """Check that the dtype is a supported floating-point dtype, and that of the pages if these are not codes.

    Raises:
        BadKernelInput: KERNEL_DTYPE.
    """
    floats(name, x, like=None if is_coded(pages) else pages)


def typed(name: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    """Check that the dtype equals `dtype`.

    Raises:
        BadKernelInput: KERNEL_DTYPE.
    """
    if x.dtype != dtype:
        raise fault(name, "DTYPE", f"the dtype must be {dtype}, not {x.dtype}")


def dense(name: str, x: torch.Tensor) -> None:
    """Check that the last dimension is contiguous.

    Raises:
        BadKernelInput: KERNEL_STRIDES.
    """
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise fault(
            name, "STRIDES", f"the last dimension has stride {x.stride(-1)}; call contiguous() on the tensor first"
        )


def contiguous(name: str, x: torch.Tensor) -> None:
    """Check that the tensor is contiguous.

    Raises:
        BadKernelInput: KERNEL_STRIDES.
    """
    if not x.is_contiguous():
        raise fault(
            name,
            "STRIDES",
            f"the tensor of shape {tuple(x.shape)} has strides {x.stride()}; call contiguous() on it first",
        )


def whole_pages(name: str, pages: torch.Tensor) -> None:
    """Check that each page is one range of memory.

    Raises:
        BadKernelInput: KERNEL_STRIDES.
    """
    if not is_coded(pages):
        contiguous(name, pages)


def shaped(name: str, x: torch.Tensor, *shape: int) -> None:
    """Check that the shape equals `shape`.

    Raises:
        BadKernelInput: KERNEL_SHAPE.
    """
    if tuple(x.shape) != shape:
        raise fault(name, "SHAPE", f"the shape must be {shape}, not {tuple(x.shape)}")


def head_dim(name: str, size: int) -> None:
    """Check the head dimension: even, for rotation, and small enough for registers.

    Raises:
        BadKernelInput: KERNEL_HEAD_SIZE.
    """
    if size % 2 or not 2 <= size <= MAX_HEAD_DIM:
        raise fault(name, "HEAD_SIZE", f"heads have {size} values; even numbers from 2 to {MAX_HEAD_DIM} are supported")


def latent_width(name: str, size: int) -> None:
    """Check the number of values of a latent vector, with the rotated part: even, for pages of whole 32-bit words.

    Raises:
        BadKernelInput: KERNEL_HEAD_SIZE.
    """
    if size % 2 or not 2 <= size <= MAX_RANK + MAX_ROTATED:
        raise fault(
            name,
            "HEAD_SIZE",
            f"latent vectors have {size} values; even numbers from 2 to {MAX_RANK + MAX_ROTATED} are supported",
        )


def pool(name: str, pages: torch.Tensor, *, planes: int | None = None) -> None:
    """Check a tensor of pages, [pages, layers, 2, K, B, D] or, with latent vectors, [pages, layers, 1, 1, B, D], in
    which the tokens of each head must be contiguous. Keys and values may be codes (`coded_pages`), latent vectors not.

    Args:
        name: the argument.
        pages: the pages.
        planes: 2 for keys and values, 1 for latent vectors; `None` for either.

    Raises:
        BadKernelInput: KERNEL_SHAPE, KERNEL_DTYPE, KERNEL_HEAD_SIZE or KERNEL_STRIDES.
    """
    shape = tuple(pages.shape)
    is_latent = len(shape) == 6 and shape[2:4] == (1, 1)
    is_other = not is_latent and (len(shape) != 6 or shape[2] != 2)
    if is_other or planes not in (None, 1 if is_latent else 2):
        wanted = {1: "[pages, layers, 1, 1, B, D]", 2: "[pages, layers, 2, K, B, D]"}
        expected = " or ".join(text for count, text in wanted.items() if planes in (None, count))
        raise fault(name, "SHAPE", f"{shape} is not {expected}")
    if not is_coded(pages) or is_latent:
        floats(name, pages)
    elif shape[4] * shape[5] % 4:
        raise fault(name, "SHAPE", f"pages of {shape[4]} tokens and {shape[5]} codes have no aligned scales; use float")
    (latent_width if is_latent else head_dim)(name, shape[5])
    dense(name, pages)


def tables(tables: npt.NDArray[np.int64], contexts: npt.NDArray[np.int64], pages: torch.Tensor) -> None:
    """Check that every block table covers its sequence's context length, and that all its pages are in the pool.

    Args:
        tables: [sequences, blocks] int64: page ids.
        contexts: [sequences] int64: context lengths in tokens.
        pages: pages of the pool, [pages, layers, 2, K, B, D] or [pages, layers, 1, 1, B, D].

    Raises:
        BadKernelInput: KERNEL_TABLE.
    """
    needed = -(-contexts // pages.shape[4])
    if int(needed.max(initial=0)) > tables.shape[1]:
        row = int(needed.argmax())
        raise fault(
            "block_tables",
            "TABLE",
            f"row {row} has {tables.shape[1]} blocks; {int(contexts[row])} tokens need {int(needed[row])}",
        )
    used: npt.NDArray[Any] = tables[np.arange(tables.shape[1]) < needed[:, None]]
    if len(used) and not 0 <= int(used.min()) <= int(used.max()) < pages.shape[0]:
        raise fault("block_tables", "TABLE", f"page ids must be between 0 and {pages.shape[0] - 1}")
