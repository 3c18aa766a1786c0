"""Pages between a device and the host beside the computation: pinned memory, a stream of its own, events.

    computes     ──step──┬──────────── step ───────────┬── step ──
                         │ event                       │ event
    copies               └── run, run, run ── event ───┴ ..       whoever needs the pages waits for that event

A copy is one call for each run of neighbouring blocks, not for each block: pages are block-major, so a run is one
range of memory on both sides. On the CPU the same calls copy at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.core.errors import UsageError
from kvferry.kernels.block_moves import runs


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Copies that have been asked for."""

    calls: int
    """To the driver; as many as there were runs."""
    event: torch.cuda.Event | None
    """`None`: they are done."""

    @property
    def is_done(self) -> bool:
        """Whether all bytes have arrived. Does not wait."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def before_next_step(self, stream: torch.cuda.Stream | None = None) -> None:
        """What is launched on the stream from now on waits for the copies; the caller does not."""
        if self.event is not None:
            (stream or torch.cuda.current_stream()).wait_event(self.event)


class HostCopies:
    """Copies of one device's pages. Calls from the thread that launches its steps."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def staging(self, pages: torch.Tensor, count: int) -> torch.Tensor:
        """Room on the host for some pages, pinned where there is a device to copy from: [count, layers, 2, K, B, D]."""
        return torch.empty(count, *pages.shape[1:], dtype=pages.dtype, pin_memory=self._stream is not None)

    def to_host(self, pages: torch.Tensor, blocks: Sequence[int], host: torch.Tensor) -> Copy:
        """`pages[blocks]` into the first rows of `host`, after what has been launched so far.

        Raises:
            UsageError: the two do not go together, or a block is not there.
        """
        self._check(pages, blocks, host)
        return self._copy([(host[r.at : r.at + r.count], pages[r.first : r.first + r.count]) for r in runs(blocks)])

    def to_device(self, host: torch.Tensor, pages: torch.Tensor, blocks: Sequence[int]) -> Copy:
        """The first rows of `host` into `pages[blocks]`, after what has been launched so far.

        Raises:
            UsageError: the two do not go together, or a block is not there.
        """
        self._check(pages, blocks, host)
        return self._copy([(pages[r.first : r.first + r.count], host[r.at : r.at + r.count]) for r in runs(blocks)])

    def _copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Copy:
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return Copy(len(pairs), None)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return Copy(len(pairs), event)

    def _check(self, pages: torch.Tensor, blocks: Sequence[int], host: torch.Tensor) -> None:
        if pages.device.type != self._device.type or host.device.type != "cpu":
            raise UsageError(
                f"pages on {pages.device}, host memory on {host.device}; copies are made for {self._device}"
            )
        if pages.shape[1:] != host.shape[1:] or pages.dtype != host.dtype or len(host) < len(blocks):
            raise UsageError(
                f"{len(blocks)} pages {tuple(pages.shape[1:])} of {pages.dtype} and room for {len(host)} pages"
                f" {tuple(host.shape[1:])} of {host.dtype}"
            )
        if not (pages.is_contiguous() and host.is_contiguous()):
            raise UsageError("pages or host memory are not contiguous, so neighbours are not one range of memory")
        if self._stream is not None and not host.is_pinned():
            raise UsageError("the host memory is not pinned, so a copy would wait for the device; take it of staging()")
        if len(blocks) and not 0 <= min(blocks) <= max(blocks) < len(pages):
            raise UsageError(f"blocks {min(blocks)} to {max(blocks)} of a pool of {len(pages)}")
