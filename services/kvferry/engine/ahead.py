"""Blocks fetched before anybody's turn: for a prompt that a prefill worker still computes.

They get pages of their own, are read and proven like any others, and go into the prefix cache, where the sequence that
they are for will find them. Nothing waits for them, and they take no page that is likely to be wanted.
"""

from dataclasses import dataclass

from kvferry.core.ids import BlockHash, BlockId, RequestId
from kvferry.engine.allocation import Allocator

_FREE_SHARE = 0.25
"""Share of the pages that stays free: a head start is not worth a preemption."""


@dataclass(frozen=True, slots=True)
class AheadRequest:
    """Blocks first_block .. first_block+len(names)-1 of a prompt, to be fetched from a source."""

    request_id: RequestId
    source: object
    """As of a load; its own first block is `first_block`'s."""
    first_block: int
    names: tuple[BlockHash, ...]
    """Of all blocks from the prompt's first to the last one wanted."""
    tokens: tuple[int, ...]
    """Of these blocks."""


@dataclass(frozen=True, slots=True)
class AheadJob:
    """One such fetch that runs; its pages are held."""

    request: AheadRequest
    targets: tuple[BlockId, ...]


class Ahead:
    """All of one engine. Owned by its thread."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._holding: dict[int, AheadJob] = {}
        """Fetches whose outcome has not come: their pages have a reference."""
        self._writing: dict[int, AheadJob] = {}
        """Fetches whose transport may still write their pages."""

    def begin(self, number: int, request: AheadRequest) -> AheadJob | None:
        """Hold pages for a fetch; `None`: there are too few, or the first block wanted is here already."""
        pool = self._allocator.pool
        count = len(request.names) - request.first_block
        if count < 1 or pool.num_free - count < pool.num_blocks * _FREE_SHARE:
            return None
        size = self._allocator.block_tokens
        start = request.first_block * size
        wanted = request.tokens[start : start + size]
        if self._allocator.index.find(request.names[request.first_block], wanted) is not None:
            return None
        pages = pool.allocate(count)
        if pages is None:
            return None
        pool.begin_write(pages)
        job = AheadJob(request, tuple(pages))
        self._holding[number] = self._writing[number] = job
        return job

    def ended(self, number: int, *, is_good: bool) -> bool:
        """A fetch is over; if it was good its blocks are cached from now on. Whether there was such a fetch.

        Its pages may still be written if it was not good: `quiet` says when that is over.
        """
        job = self._holding.pop(number, None)
        if job is None:
            return False
        if is_good:
            self.quiet(number)
            self._list(job)
        self._allocator.pool.release(job.targets)
        return True

    def quiet(self, number: int) -> bool:
        """Nobody writes a fetch's pages any more; whether there was such a fetch."""
        job = self._writing.pop(number, None)
        if job is not None:
            self._allocator.pool.end_write(job.targets)
        return job is not None

    @property
    def held(self) -> list[tuple[BlockId, ...]]:
        """Pages that have a reference here."""
        return [job.targets for job in self._holding.values()]

    def __len__(self) -> int:
        """Fetches that hold pages, or whose transport may write them."""
        return len(self._writing)

    def _list(self, job: AheadJob) -> None:
        size, names, tokens = self._allocator.block_tokens, job.request.names, job.request.tokens
        for block, i in zip(job.targets, range(job.request.first_block, len(names)), strict=True):
            parent = names[i - 1] if i else None
            self._allocator.index.add(names[i], tokens[i * size : (i + 1) * size], block, parent=parent, depth=i)
