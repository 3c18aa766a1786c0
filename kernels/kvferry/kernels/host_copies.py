"""Page copies between a GPU and the host's mirror of its pages, on a separate stream.

    computes   ──step──┬──────────── step ──────────── step ──
                       │ event
    copies             └── run, run, run ── event          the calling thread waits for this event; steps do not

Row i of the mirror is page i, so each run of consecutive pages is one contiguous range on both sides, and one call.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from kvferry.core.errors import UsageError
from kvferry.kernels.block_moves import runs


class CopyStream(Protocol):
    """A stream of copies, separate from the stream of the steps. A protocol, because the order of copies and steps is
    also checked without a GPU, by a stream that delays its copies."""

    def after_steps(self) -> None:
        """Order the following copies after all steps launched so far."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy of contiguous bytes.

        Args:
            target, source: contiguous uint8 of equal shape, one on the device and the other in pinned host memory.
        """
        ...

    def wait(self) -> None:
        """Wait until all copies are complete."""
        ...


class CudaCopyStream:
    """`CopyStream` of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._compute = torch.cuda.default_stream(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def after_steps(self) -> None:
        launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
        launched.record(self._compute)
        self._stream.wait_event(launched)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        # A blocking event: the thread sleeps instead of spinning on a core that the steps' launches need.
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(self._stream)
        copied.synchronize()


class HostCopies:
    """Copies between the pages of one device and their mirror. Use it on one thread, which may be a different thread
    from the steps' thread."""

    def __init__(self, pages: torch.Tensor, host: memoryview, stream: CopyStream) -> None:
        """
        Args:
            pages: [num_blocks, ...] contiguous.
            host: the mirror: num_blocks rows, each of the size of a page in bytes; see `pin`. It must outlive this
                object.
            stream: stream that runs the copies.

        Raises:
            UsageError: sizes do not match, or `pages` is not contiguous.
        """
        if not pages.is_contiguous():
            raise UsageError("the pages are not contiguous", field="pages")
        if pages.numel() * pages.element_size() != host.nbytes:
            raise UsageError(
                f"the mirror must have {pages.numel() * pages.element_size()} bytes like the pages, not {host.nbytes}",
                field="host",
            )
        self._pages = pages.view(len(pages), -1).view(torch.uint8)
        self._host = torch.frombuffer(host, dtype=torch.uint8).view(len(pages), -1)
        self._stream = stream

    def to_host(self, blocks: Sequence[int]) -> None:
        """Copy pages to their rows, after all steps launched so far; return when the copies are complete.

        Raises:
            UsageError: a block is out of range.
        """
        self._copy(self._host, self._pages, blocks)

    def to_device(self, blocks: Sequence[int]) -> None:
        """Copy rows to their pages, after all steps launched so far; return when the copies are complete.

        Raises:
            UsageError: a block is out of range.
        """
        self._copy(self._pages, self._host, blocks)

    @torch.inference_mode()
    def _copy(self, target: torch.Tensor, source: torch.Tensor, blocks: Sequence[int]) -> None:
        if len(blocks) and not 0 <= min(blocks) <= max(blocks) < len(target):
            raise UsageError(
                f"blocks {min(blocks)} to {max(blocks)} are out of range: the pool has {len(target)} pages",
                field="blocks",
            )
        self._stream.after_steps()
        for run in runs(blocks):
            span = slice(run.first, run.first + run.count)
            self._stream.copy(target[span], source[span])
        self._stream.wait()


def pin(memory: memoryview) -> None:
    """Pin host memory for the rest of the process, so that copies run concurrently with the steps.

    Raises:
        UsageError: the driver rejects it, for example because of the limit on locked memory.
    """
    host = torch.frombuffer(memory, dtype=torch.uint8)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(host.data_ptr(), host.numel(), 0))
    if code:
        raise UsageError(
            f"cudaHostRegister failed with error {code} for {host.numel()} bytes of host memory for KV; raise the "
            "limit on locked memory (ulimit -l), or set a smaller --kv-memory",
            field="kv_memory",
        )
