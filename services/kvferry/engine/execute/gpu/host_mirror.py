"""The host mirror of a device's pages: one thread makes all copies, in the order of the requests."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from kvferry.core.epochs import EpochTable
from kvferry.core.ids import BlockId
from kvferry.kv.interface.mirror import CopyError

COPY_SECONDS = 30.0
"""Time limit of a request, including those before it. A copy of 1 GiB takes 0.1 s over a slow bus; a device that
exceeds this limit counts as lost."""


class PageCopies(Protocol):
    """Copies between the pages of a device and their rows in host memory. Both methods return when the copies are
    complete, and order them after all steps launched before the call."""

    def to_host(self, blocks: Sequence[int]) -> None:
        """Copy pages to their rows."""
        ...

    def to_device(self, blocks: Sequence[int]) -> None:
        """Copy rows to their pages."""
        ...


class HostMirror:
    """`PageMirror` of a device. Thread-safe.

    Rows are safe because one thread processes the requests in order. Before a copy to the host, the same thread checks
    the page's epoch. So a copy either is made before the page is allocated again and ends before the `settle` of the
    row's next writer, or it is not made.
    """

    def __init__(self, copies: PageCopies, epochs: EpochTable, *, seconds: float = COPY_SECONDS) -> None:
        """
        Args:
            copies: makes the copies.
            epochs: epoch of each page, written by the engine's thread when it allocates a page.
            seconds: time limit of each call.
        """
        self._copies = copies
        self._epochs = epochs
        self._seconds = seconds
        self._copied: dict[BlockId, int] = {}
        """Epoch in which each page was last copied to the host when it was full. Used on the thread."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-copy")
        self._closed = threading.Event()

    def settle(self) -> None:
        self._wait(lambda: None)

    def to_host(self, blocks: Sequence[BlockId], epochs: Sequence[int] | None, *, num_full: int | None = None) -> None:
        def copy() -> None:
            now = [self._epochs[block] for block in blocks]
            valid = [epochs is None or epochs[i] == epoch for i, epoch in enumerate(now)]
            due = [i for i, block in enumerate(blocks) if valid[i] and self._copied.get(block) != now[i]]
            if due:
                self._copies.to_host([blocks[i] for i in due])
            full = len(blocks) if num_full is None else num_full
            self._copied |= {blocks[i]: now[i] for i in due if i < full}

        self._wait(copy)

    def to_device(self, blocks: Sequence[BlockId]) -> None:
        self._wait(lambda: self._copies.to_device(blocks))

    def close(self) -> None:
        self._closed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _wait(self, copy: Callable[[], None]) -> None:
        if self._closed.is_set():
            raise CopyError("the worker is stopping")
        try:
            made: Future[None] = self._thread.submit(copy)
            made.result(self._seconds)
        except TimeoutError as error:
            made.cancel()
            raise CopyError(f"the device did not complete a copy of pages in {self._seconds:g} s") from error
        except Exception as error:  # from the device, or from a pool that is shut down
            raise CopyError(f"pages were not copied between host and device: {error}") from error
