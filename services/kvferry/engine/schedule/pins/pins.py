"""Pins: references to the cached blocks of prefixes, each with a deadline, within a quota of pages. Pure.

A pinned page has one reference of each pin that contains it, so the pool neither evicts nor reuses it while a pin lasts
(Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023, section
4.4, "Shared prefix": the provider reserves the blocks of a set of prefixes). Pages that are in several pins count once
against the quota.

The quota also leaves enough pages for the longest request. Pins are not removed to admit a request, so without this
limit a request could wait for pages until a pin expires.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvferry.core.errors import Overloaded
from kvferry.core.ids import AdapterId, BlockHash, BlockId
from kvferry.engine.schedule.blocks.block_pool import BlockPool

MAX_PINS = 1000
"""Maximum number of pins of an engine."""
MAX_TTL_SECONDS = 7 * 24 * 3600.0
"""Longest time to live of a pin."""


@dataclass(slots=True)
class Pin:
    """A pinned prefix. Its name, the name of its last block, identifies the tokens and the scope of the prefix."""

    name: BlockHash
    num_tokens: int
    """Number of tokens in the full blocks of the prefix."""
    num_blocks: int
    """Number of full blocks of the prefix."""
    pages: tuple[BlockId, ...]
    """Pages of the blocks in all layer groups; groups with a window have the pages that later rows read."""
    deadline: float
    """End of the pin, monotonic seconds."""
    adapter: AdapterId | None = None
    """Version of the adapter that computed the prefix; `None` for the base model."""


class PageUses:
    """Counts the pins of each page."""

    def __init__(self) -> None:
        self._counts: Counter[BlockId] = Counter()

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, page: BlockId) -> bool:
        return page in self._counts

    def add(self, pages: Iterable[BlockId]) -> None:
        """Count the pages of a pin."""
        self._counts.update(pages)

    def remove(self, pages: Iterable[BlockId]) -> None:
        """Subtract a counted pin from the counts of its pages."""
        for page in pages:
            self._counts[page] -= 1
            if not self._counts[page]:
                del self._counts[page]


class Pins:
    """A set of pins of one engine. Owned by the engine's thread."""

    def __init__(self, pool: BlockPool, quota: Callable[[], int], all_uses: "PageUses | None" = None) -> None:
        """
        Args:
            pool: the pages.
            quota: returns the maximum number of pinned pages.
            all_uses: counts the pages of all pins of the engine, if it has several sets of pins.
        """
        self._pool = pool
        self._quota = quota
        self._all_uses = PageUses() if all_uses is None else all_uses
        self._pins: dict[BlockHash, Pin] = {}
        self._uses = PageUses()
        self.next_deadline: float | None = None
        """Earliest deadline of all pins, monotonic seconds; `None` without pins."""

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_pages(self) -> int:
        """Number of pinned pages; a page in several pins counts once."""
        return len(self._uses)

    @property
    def num_references(self) -> int:
        """Number of pages of all pins; a page counts once for each pin that contains it."""
        return sum(len(pin.pages) for pin in self._pins.values())

    @property
    def quota(self) -> int:
        """Maximum number of pinned pages."""
        return self._quota()

    @property
    def held(self) -> list[tuple[BlockId, ...]]:
        """Pages of each pin."""
        return [pin.pages for pin in self._pins.values()]

    def num_unpinned(self, pages: Iterable[BlockId]) -> int:
        """Return how many of these pages, each listed once, are in no pin."""
        return sum(page not in self._uses for page in pages)

    def check_room(self, num_pages: int, *, num_reserved: int, num_pins: int) -> None:
        """Check that another pin with `num_pages` pages that are in no pin yet fits.

        Args:
            num_pages: number of pages.
            num_reserved: number of pages reserved for other prefixes that are being computed.
            num_pins: number of these prefixes.

        Raises:
            Overloaded: the quota of pages, or the number of pins, would be exceeded.
        """
        if len(self._pins) + num_pins >= MAX_PINS:
            raise Overloaded(
                f"{len(self._pins) + num_pins} prefixes are pinned or being computed, the maximum of a worker; unpin "
                "one, or wait until one expires",
                reason="PIN_QUOTA",
            )
        quota, used = self._quota(), self.num_pages + num_reserved
        if num_pages > quota - used:
            raise Overloaded(
                f"the prefix needs {num_pages} more pages, but pins may use {quota} pages and use {used}; unpin a "
                "prefix, wait until one expires, raise --pin-share, or give the worker more KV memory beyond its "
                "longest request",
                reason="PIN_QUOTA",
            )

    def add(self, pin: Pin) -> None:
        """Add a pin and hold its pages; `check_room` must have accepted them, and the name must be new."""
        self._pool.hold(pin.pages)
        self._uses.add(pin.pages)
        self._all_uses.add(pin.pages)
        self._pins[pin.name] = pin
        self._note_deadline()

    def find(self, name: BlockHash) -> Pin | None:
        """Return the pin of a prefix; `None` if there is none.

        Args:
            name: name of the prefix's last block.
        """
        return self._pins.get(name)

    def renew(self, name: BlockHash, deadline: float) -> Pin | None:
        """Extend a pin to a later deadline; an earlier one has no effect. Return the pin; `None` without one.

        Args:
            name: name of the pinned prefix's last block.
            deadline: monotonic seconds.
        """
        pin = self._pins.get(name)
        if pin is not None and deadline > pin.deadline:
            pin.deadline = deadline
            self._note_deadline()
        return pin

    def remove(self, name: BlockHash) -> Pin | None:
        """End a pin; return it, or `None` if there is no such pin. Its blocks stay cached until they are evicted."""
        pin = self._take(name)
        if pin is not None:
            self._note_deadline()
        return pin

    def expire(self, now: float) -> None:
        """End the pins whose deadline has passed.

        Args:
            now: monotonic seconds.
        """
        if self.next_deadline is not None and self.next_deadline <= now:
            self.drop(lambda pin: pin.deadline <= now)

    def keep_version(self, name: str, adapter: AdapterId | None) -> None:
        """End the pins of an adapter's other versions, whose KV no new request can use.

        Args:
            name: name of the adapter.
            adapter: its current version; `None` if it was removed.
        """
        self.drop(lambda pin: pin.adapter is not None and pin.adapter.name == name and pin.adapter != adapter)

    def keep_listed(self, is_listed: Callable[[BlockId], bool]) -> None:
        """End the pins of which a failure has removed a block from the cache.

        Args:
            is_listed: returns whether a page is in the prefix index.
        """
        self.drop(lambda pin: not all(map(is_listed, pin.pages)))

    def drop(self, condition: Callable[[Pin], bool]) -> int:
        """End the pins that meet a condition; return their number."""
        dropped = [pin.name for pin in self._pins.values() if condition(pin)]
        for name in dropped:
            self._take(name)
        if dropped:
            self._note_deadline()
        return len(dropped)

    def _take(self, name: BlockHash) -> Pin | None:
        pin = self._pins.pop(name, None)
        if pin is not None:
            self._pool.release(pin.pages)
            self._uses.remove(pin.pages)
            self._all_uses.remove(pin.pages)
        return pin

    def _note_deadline(self) -> None:
        self.next_deadline = min((pin.deadline for pin in self._pins.values()), default=None)
