"""The mirror: a host copy of pages that an engine keeps on a device, for access by transports and tiers.

    P   engine ── pages on the device ──to_host──► mirror ── transport, tiers ──► peers, storage
    D   peers, storage ── transport, tiers ──► mirror ──to_device──► pages on the device ── engine

Row i of the mirror is page i. It has the content of the device's page only after `to_host` or `to_device`, and only as
long as the epoch of the page does not change. Hence the two rules of this interface:

- A page is named to peers (in offers, progress reports, tickets of prior turns) after `to_host`.
- A transport writes to a row after `settle`, so that no earlier copy also writes to it; the engine uses the page after
    `to_device`.

An engine that keeps its pages in host memory has no mirror: transports access the pages (`SAME_PAGES`).
"""

from collections.abc import Sequence
from typing import Protocol

from kvferry.core.ids import BlockId


class CopyError(Exception):
    """Pages could not be copied; their content on the other side is unknown."""


class PageMirror(Protocol):
    """The mirror of one engine's pages. Every method blocks for a bounded time, and may be called from any thread
    except the engine's."""

    def settle(self) -> None:
        """Wait until all copies requested so far have stopped writing to the mirror.

        Raises:
            CopyError: the copies did not end in time.
        """
        ...

    def to_host(self, blocks: Sequence[BlockId], epochs: Sequence[int] | None, *, num_full: int | None = None) -> None:
        """Copy pages to the mirror, after all previously launched steps.

        A full page does not change during its epoch, so it is copied once: a peer may be reading its row.

        Args:
            blocks: the pages.
            epochs: epochs of the pages at the time of the content to copy. Pages whose epoch has changed are skipped: a
                transport may be writing to their rows, and readers reject their old content. `None` if the caller holds
                the pages.
            num_full: number of leading pages that are full; `None` if all are.

        Raises:
            CopyError: the pages were not copied.
        """
        ...

    def to_device(self, blocks: Sequence[BlockId]) -> None:
        """Copy rows of the mirror to the pages, after all previously launched steps.

        Raises:
            CopyError: the pages were not copied.
        """
        ...

    def close(self) -> None:
        """Release the resources; copies in progress are completed. Idempotent."""
        ...


class SamePages:
    """`PageMirror` for pages in host memory, which transports and the engine both access, so that nothing is copied."""

    def settle(self) -> None:
        """Do nothing."""

    def to_host(self, blocks: Sequence[BlockId], epochs: Sequence[int] | None, *, num_full: int | None = None) -> None:
        """Do nothing."""

    def to_device(self, blocks: Sequence[BlockId]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


SAME_PAGES = SamePages()
