"""Computes digests of this worker's pages for tickets, if `--verify-kv digest` is set."""

import asyncio
from collections.abc import Sequence

from kvferry.kv.pages.digests import page_digests


class PageDigester:
    """Computes page digests in a thread; if disabled, returns no digests."""

    def __init__(self, pages: memoryview, block_bytes: int, *, enabled: bool) -> None:
        self._pages = pages
        self._block_bytes = block_bytes
        self._enabled = enabled

    async def digests(self, block_ids: Sequence[int]) -> tuple[bytes, ...]:
        """Return the digests of the current content of pages; empty if disabled.

        Unpinned pages may be reused during the computation; in this case their epochs differ, and the digests are not
        used.
        """
        if not self._enabled:
            return ()
        return await asyncio.to_thread(page_digests, self._pages, self._block_bytes, block_ids)
