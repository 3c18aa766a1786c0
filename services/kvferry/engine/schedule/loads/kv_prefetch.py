"""KV prefetch: fetches blocks of a prompt into the prefix cache while a prefill worker is still computing the prompt.

The blocks are read into newly allocated pages, verified as in any load, and added to the prefix index, so that the
prompt's sequence finds them there later. No sequence waits for a prefetch, and prefetches leave a reserve of free
pages.
"""

from dataclasses import dataclass

from kvferry.core.ids import BlockHash, BlockId, RequestId
from kvferry.engine.schedule.blocks.allocation import Allocator

NO_JOB = -1
"""Number of the outcome of a prefetch that was refused before it had a job."""
_FREE_SHARE = 0.25
"""Share of the pages that stay free, so that a KV prefetch does not cause a preemption."""


@dataclass(frozen=True, slots=True)
class KvPrefetchRequest:
    """Command: fetch blocks first_block .. len(names)-1 of a prompt into the prefix cache."""

    request_id: RequestId
    source: object
    """Source of the blocks, like `RemoteKv.source`; its first block is `first_block`."""
    first_block: int
    names: tuple[BlockHash, ...]
    """Names of the prompt's blocks, from its first block to the last block to fetch."""
    tokens: tuple[int, ...]
    """Token ids of the blocks in `names`."""


@dataclass(frozen=True, slots=True)
class PrefetchJob:
    """A running KV prefetch; its pages are held."""

    request: KvPrefetchRequest
    targets: tuple[BlockId, ...]


class KvPrefetch:
    """All KV prefetches of one engine. Owned by the engine's thread."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._holding: dict[int, PrefetchJob] = {}
        """Running fetches by job number; each of their pages has a reference."""
        self._writing: dict[int, PrefetchJob] = {}
        """Fetches whose transport may still write to their pages, by job number."""

    def begin(self, number: int, request: KvPrefetchRequest, *, num_promised: int = 0) -> PrefetchJob | None:
        """Allocate pages for a fetch; return `None` if too few pages are free or the first block is already cached.

        Args:
            number: job number of the fetch.
            request: the blocks to fetch.
            num_promised: free pages that admitted sequences still need.
        """
        pool = self._allocator.pool
        count = len(request.names) - request.first_block
        if count < 1 or pool.num_free - num_promised - count < pool.num_blocks * _FREE_SHARE:
            return None
        size = self._allocator.block_tokens
        start = request.first_block * size
        tokens = request.tokens[start : start + size]
        if self._allocator.index.find(request.names[request.first_block], tokens) is not None:
            return None
        pages = pool.allocate(count)
        if pages is None:
            return None
        pool.begin_write(pages)
        job = PrefetchJob(request, tuple(pages))
        self._holding[number] = self._writing[number] = job
        return job

    def ended(self, number: int, *, is_good: bool) -> bool:
        """Record the end of a fetch; on success, add its blocks to the prefix index. Return whether the fetch existed.

        After a failure the transport may still write to the pages until `quiet`.

        Args:
            number: number of the fetch.
            is_good: whether all pages were received and verified.
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
        """Record that the transport no longer writes to a fetch's pages; return whether the fetch existed."""
        job = self._writing.pop(number, None)
        if job is not None:
            self._allocator.pool.end_write(job.targets)
        return job is not None

    @property
    def held(self) -> list[tuple[BlockId, ...]]:
        """Pages held by running fetches, one tuple per fetch."""
        return [job.targets for job in self._holding.values()]

    def __len__(self) -> int:
        """Return the number of fetches that hold pages or whose transport may write to them."""
        return len(self._writing)

    def _list(self, job: PrefetchJob) -> None:
        size, names, tokens = self._allocator.block_tokens, job.request.names, job.request.tokens
        for block, i in zip(job.targets, range(job.request.first_block, len(names)), strict=True):
            parent = names[i - 1] if i else None
            self._allocator.index.add(names[i], tokens[i * size : (i + 1) * size], block, parent=parent, depth=i)
