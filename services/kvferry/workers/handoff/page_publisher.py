"""Makes pages readable by peers: copies them to the mirror, and computes their digests."""

import asyncio
from collections.abc import Sequence

from kvferry.core.errors import Unavailable
from kvferry.core.ids import BlockId
from kvferry.kv.interface.mirror import SAME_PAGES, CopyError, PageMirror
from kvferry.kv.pages.digests import page_digests


class PagePublisher:
    """Publishes the pages of one engine. Copies and digests are made on another thread; if neither is needed, does
    nothing."""

    def __init__(
        self, pages: memoryview, block_bytes: int, mirror: PageMirror = SAME_PAGES, *, with_digests: bool
    ) -> None:
        """
        Args:
            pages: the memory that transports access.
            block_bytes: bytes of one page.
            mirror: mapping between this memory and the engine's pages.
            with_digests: whether to compute digests, for `--verify-kv digest`.
        """
        self._pages = pages
        self._block_bytes = block_bytes
        self._mirror = mirror
        self._with_digests = with_digests

    async def publish(
        self, blocks: Sequence[BlockId], epochs: Sequence[int], *, num_full: int | None = None
    ) -> tuple[bytes, ...]:
        """Make pages readable; return their digests, or an empty result if digests are off.

        Unpinned pages may be reused meanwhile; their epochs then differ from `epochs`, and peers use neither content
        nor digests.

        Args:
            blocks: the pages.
            epochs: epochs of the pages at the time of the content.
            num_full: number of leading pages that are full; `None` if all are.

        Raises:
            Unavailable: the pages could not be copied from the device.
        """
        if self._mirror is SAME_PAGES and not self._with_digests:
            return ()
        return await asyncio.to_thread(self._publish, blocks, epochs, num_full)

    def _publish(self, blocks: Sequence[BlockId], epochs: Sequence[int], num_full: int | None) -> tuple[bytes, ...]:
        try:
            self._mirror.to_host(blocks, epochs, num_full=num_full)
        except CopyError as error:
            raise Unavailable(str(error), reason="DEVICE_COPY_FAILED") from error
        return tuple(page_digests(self._pages, self._block_bytes, blocks)) if self._with_digests else ()
