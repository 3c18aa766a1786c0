"""Checks of peers' addresses and of page ids, for all connectors."""

from collections.abc import Sequence
from typing import TypeVar

from kvferry.kv.interface.connector import Peer, ReadError

T = TypeVar("T")


def allocated(pages: T | None) -> T:
    """Return the pages of this worker.

    Raises:
        ReadError: they are `None`: no pages are allocated.
    """
    if pages is None:
        raise ReadError("this worker has allocated no pages")
    return pages


def check_address(peer: Peer, incarnation: str, num_blocks: int = 1, block_bytes: int = 1) -> None:
    """Check the address of a peer's pages.

    Args:
        peer: the peer that the address must belong to.
        incarnation: incarnation in the address.
        num_blocks: number of pages in the address.
        block_bytes: bytes of one page in the address.

    Raises:
        ReadError: the address is of another incarnation, or has no pages.
    """
    if incarnation != peer.incarnation:
        raise ReadError(f"worker {peer.worker_id}: the address is of incarnation {incarnation}, not {peer.incarnation}")
    if num_blocks < 1 or block_bytes < 1:
        raise ReadError(
            f"worker {peer.worker_id}: the address has {num_blocks} pages of {block_bytes} bytes; both must be positive"
        )


def check_page_ids(ids: Sequence[int], num_pages: int, owner: str) -> None:
    """Check that pages exist.

    Args:
        ids: page ids; may be empty.
        num_pages: number of the owner's pages.
        owner: the owner as the message names it, such as "this worker".

    Raises:
        ReadError: an id is out of range.
    """
    if ids and (min(ids) < 0 or max(ids) >= num_pages):
        raise ReadError(f"page ids of {owner} must be from 0 to {num_pages - 1}, not {min(ids)} to {max(ids)}")
