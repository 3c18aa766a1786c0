"""Asynchronous page copies between device and host, with pinned memory, a separate stream and events.

    computes     ──step──┬──────────── step ───────────┬── step ──
                         │ event                       │ event
    copies               └── run, run, run ── event ───┴ ..       users of the pages wait for the event

Each run of consecutive blocks is copied by one call, since pages are block-major and a run is one contiguous range on
both sides. On the CPU, the same calls copy synchronously.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.core.errors import UsageError
from kvferry.kernels.block_moves import runs


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Page copies in flight."""

    calls: int
    """Number of copy calls to the driver, one per run."""
    event: torch.cuda.Event | None
    """Event recorded after the copies; `None` if the copies are already complete."""

    @property
    def is_done(self) -> bool:
        """Whether the copies are complete; reading it does not block."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def before_next_step(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make later launches on the stream wait for the copies; the caller does not wait."""
        if self.event is not None:
            (stream or torch.cuda.current_stream()).wait_event(self.event)


class HostCopies:
    """Page copies between one device and the host. Use it on the thread that launches the device's steps."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def staging(self, pages: torch.Tensor, count: int) -> torch.Tensor:
        """Allocate host memory for `count` pages, pinned unless the device is the CPU: [count, layers, 2, K, B, D]."""
        return torch.empty(count, *pages.shape[1:], dtype=pages.dtype, pin_memory=self._stream is not None)

    def to_host(self, pages: torch.Tensor, blocks: Sequence[int], host: torch.Tensor) -> Copy:
        """Copy `pages[blocks]` to the first rows of `host`, after all launches so far.

        Raises:
            UsageError: shapes, dtypes or devices do not match, or a block is out of range.
        """
        self._check(pages, blocks, host)
        return self._copy([(host[r.at : r.at + r.count], pages[r.first : r.first + r.count]) for r in runs(blocks)])

    def to_device(self, host: torch.Tensor, pages: torch.Tensor, blocks: Sequence[int]) -> Copy:
        """Copy the first rows of `host` to `pages[blocks]`, after all launches so far.

        Raises:
            UsageError: shapes, dtypes or devices do not match, or a block is out of range.
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
                f"pages are on {pages.device} and host memory on {host.device}; this object copies for {self._device}"
            )
        if pages.shape[1:] != host.shape[1:] or pages.dtype != host.dtype or len(host) < len(blocks):
            raise UsageError(
                f"{len(blocks)} pages {tuple(pages.shape[1:])} of {pages.dtype} and room for {len(host)} pages"
                f" {tuple(host.shape[1:])} of {host.dtype}"
            )
        if not (pages.is_contiguous() and host.is_contiguous()):
            raise UsageError("pages or host memory are not contiguous; call contiguous() on them first")
        if self._stream is not None and not host.is_pinned():
            raise UsageError("the host memory is not pinned, so a copy would block; allocate it with staging()")
        if len(blocks) and not 0 <= min(blocks) <= max(blocks) < len(pages):
            raise UsageError(f"blocks {min(blocks)} to {max(blocks)} are out of range: the pool has {len(pages)} pages")
