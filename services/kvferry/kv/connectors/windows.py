"""Page copies between two memory ranges in one address space; used by the connectors `memory` and `shm`."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.core.epochs import EpochTable
from kvferry.core.ids import BlockId
from kvferry.kv.connectors.checks import check_page_ids
from kvferry.kv.interface.connector import ReadError

Pages = npt.NDArray[np.uint8]
"""Page memory as an array [num_blocks, block_bytes]."""


def as_pages(memory: memoryview, num_blocks: int, block_bytes: int) -> Pages:
    """View page memory as an array [num_blocks, block_bytes]."""
    return np.frombuffer(memory, dtype=np.uint8, count=num_blocks * block_bytes).reshape(num_blocks, block_bytes)


def copy_pages(source: Pages, remote: Sequence[int], target: Pages, local: Sequence[BlockId]) -> None:
    """Copy pages pairwise, with one copy per run of consecutive pages; numpy releases the GIL while it copies.

    Args:
        source: pages of the peer, [pages, bytes].
        remote: page ids in `source`.
        target: pages of this worker, [pages, bytes].
        local: page ids in `target`, one per id in `remote`.

    Raises:
        ReadError: the lists differ in length, a page id is out of range, or page sizes differ.
    """
    if len(remote) != len(local) or source.shape[1] != target.shape[1]:
        raise ReadError(
            f"cannot copy {len(remote)} pages of {source.shape[1]} B into {len(local)} of {target.shape[1]} B"
        )
    if not remote:
        return
    check_page_ids(remote, source.shape[0], "the peer")
    check_page_ids(local, target.shape[0], "this worker")
    start = 0
    for end in range(1, len(remote) + 1):
        runs_on = end < len(remote) and remote[end] == remote[end - 1] + 1 and local[end] == local[end - 1] + 1
        if not runs_on:
            count = end - start
            target[local[start] : local[start] + count] = source[remote[start] : remote[start] + count]
            start = end


def copy_raw(source: Pages, remote: Sequence[int], into: memoryview) -> None:
    """Copy pages contiguously into `into`.

    Args:
        source: the peer's pages, [pages, bytes of a page] uint8.
        remote: ids of the pages to copy, in order.
        into: writable bytes, exactly as long as the pages.

    Raises:
        ReadError: the length of `into` differs from that of the pages, or a page id is out of range.
    """
    size = source.shape[1]
    if len(into) != len(remote) * size:
        raise ReadError(f"cannot copy {len(remote)} pages of {size} B into {len(into)} B")
    copy_pages(source, remote, as_pages(into, len(remote), size), [BlockId(i) for i in range(len(remote))])


def epochs_of(epochs: EpochTable, blocks: Sequence[int]) -> list[int]:
    """Return the current epochs of pages.

    Args:
        epochs: the epoch of each page.
        blocks: page ids, from an untrusted message.

    Raises:
        ReadError: a page id is out of range.
    """
    check_page_ids(blocks, len(epochs), "the peer")
    return [epochs[b] for b in blocks]


class CompletedRead:
    """A read that completed synchronously."""

    def poll(self) -> bool:
        return True

    def is_quiet(self) -> bool:
        return True

    def wait(self, seconds: float) -> None:
        """Return immediately, since the read is complete."""
