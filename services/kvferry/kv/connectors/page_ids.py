"""Check of the page ids of a read."""

from collections.abc import Sequence

from kvferry.kv.interface.connector import ReadError


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
        raise ReadError(f"page ids of {owner} must be 0 to {num_pages - 1}, not {min(ids)} to {max(ids)}")
