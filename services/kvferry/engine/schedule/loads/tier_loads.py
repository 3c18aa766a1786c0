"""Looks up, loads and stores the KV of one engine in tiers. KV is looked up on arrival and after preemption, and loaded
if that is faster than computing.

    blocks      [ b0 b1 | b2 b3 | b4 b5 | b6        2 blocks per object
    local hit   [ b0 b1   b2 ]
    looked up           |  o1   |  o2   |           o1 only for b3
    decided             |  o1   |                   o2 is faster to compute

For a preempted sequence, all objects are looked up, including objects with generated tokens: its blocks are cached only
until other sequences take the pages, possibly before its next admission. Once pages are free, it is admitted even if
the lookup is pending. The time limit of its load is the time to recompute the same positions, so that a load is never
slower than recomputation alone (swapping and recomputation: Kwon et al., PagedAttention, section 4.5).

Owned by the engine's thread.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kvferry.core.ids import BlockId, RequestId
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.step.kv_jobs import LoadJob, StoreJob
from kvferry.engine.schedule.step.kv_progress import RemoteKv
from kvferry.engine.schedule.step.sequence import Sequence
from kvferry.kv.interface.tiering import KvTiers, ObjectKey, TierAnswer, TierSource
from kvferry.kv.pricing.price import LoadDecision, LoadPolicy, Piece, PriceBook

_MIN_SECONDS = 0.1
"""Minimum time limit of a load in seconds; estimates of shorter times are mostly noise."""
_FORCED_SECONDS = 10.0

Answered = Callable[[RequestId, RemoteKv | None], bool]
Decided = Callable[[RequestId, LoadDecision], None]


@dataclass(frozen=True, slots=True)
class _Lookup:
    first_object: int
    hit_tokens: int
    keys: tuple[ObjectKey, ...]
    is_again: bool = False
    """Whether this lookup follows a preemption."""


class TierLoads:
    """Tier lookups, loads and stores of one engine."""

    def __init__(
        self,
        tiers: KvTiers,
        allocator: Allocator,
        prices: PriceBook,
        *,
        block_bytes: int,
        waits: Callable[[RequestId], bool],
        answered: Answered,
        decided: Decided,
    ) -> None:
        """
        Args:
            tiers: KV tiers to load from and store to.
            allocator: the engine's pages and prefix caches.
            prices: cost model of loading and computing.
            block_bytes: bytes of one block in all layer groups.
            waits: returns whether a request is still waiting for pages.
            answered: called with the KV that a sequence can load, or `None`; see `Scheduler.answered`.
            decided: called with every load-or-recompute decision.
        """
        self.tiers = tiers
        self._allocator = allocator
        self._prices = prices
        self._block_bytes = block_bytes
        self._object_tokens = tiers.object_blocks * allocator.block_tokens
        self._waits = waits
        self._answered = answered
        self._decided = decided
        self._lookups: dict[RequestId, _Lookup] = {}
        self._stores: dict[int, tuple[BlockId, ...]] = {}
        self._next_store = 0
        self._num_held = 0

    def arrive(self, sequence: Sequence) -> None:
        """Look up the storage objects of a waiting sequence beyond its local prefix hit, if there are any."""
        size = self.tiers.object_blocks
        names = sequence.name_blocks()
        hit = len(self._allocator.peek(names, sequence.sampling.tokens, max_tokens=sequence.num_tokens - 1))
        first, end = hit // size, (sequence.num_tokens - 1) // self._object_tokens
        if first >= end:
            return
        sequence.kv.begin_lookup()
        self._ask(sequence, _Lookup(first, hit * self._allocator.block_tokens, self._keys(sequence, first, end)))

    def ask_again(self, preempted: Iterable[Sequence]) -> None:
        """Look up the storage objects of preempted sequences, prompt and output, without delaying their admission."""
        for sequence in preempted:
            end = (sequence.num_tokens - 1) // self._object_tokens
            if end > 0:
                self._ask(sequence, _Lookup(0, 0, self._keys(sequence, 0, end), is_again=True))

    def _keys(self, sequence: Sequence, first: int, end: int) -> tuple[ObjectKey, ...]:
        size, names = self.tiers.object_blocks, sequence.name_blocks()
        return tuple(ObjectKey(names[(i + 1) * size - 1], sequence.request.scope) for i in range(first, end))

    def _ask(self, sequence: Sequence, lookup: _Lookup) -> None:
        self._lookups[sequence.request_id] = lookup
        answer = self.tiers.ask(sequence.request_id, lookup.keys)
        if answer is not None:
            self.on_answer(answer)

    def on_answer(self, answer: TierAnswer) -> None:
        """Process the result of a lookup: decide whether to load, and let the sequence be admitted."""
        lookup = self._lookups.pop(answer.request_id, None)
        if lookup is None:
            return  # the request was aborted after the lookup
        if lookup.is_again and not self._waits(answer.request_id):
            return  # the sequence was admitted after the lookup and computes its tokens
        remote = self._choose(answer, lookup) if answer.sources else None
        self._answered(answer.request_id, remote)

    def bounded(self, job: LoadJob, source: TierSource) -> TierSource:
        """Return the source of a load with its time limit. A resumed sequence waits at most for the time to compute its
        missing positions; forced loads have a separate limit.

        Args:
            job: the load.
            source: the storage objects, with the default time limit.
        """
        if not job.is_return or self._prices.policy is LoadPolicy.ALWAYS:
            return source
        first = job.first_block * self._allocator.block_tokens
        seconds = self._prices.compute_seconds(first, job.remote.num_tokens - first)
        return replace(source, seconds=min(source.seconds, seconds))

    def forget(self, request_id: RequestId) -> None:
        """Cancel the lookups and loads of a request that ended. Idempotent."""
        self._lookups.pop(request_id, None)
        self.tiers.cancel(request_id)

    def store(self, job: StoreJob) -> None:
        """Store an object if the tiers accept it and pending stores do not hold too many pages."""
        if self._num_held + len(job.blocks) > self._allocator.pool.num_blocks * self.tiers.held_share:
            return
        if not self.tiers.accepts(job.key):
            return
        number = self._next_store
        self._next_store += 1
        self._allocator.pool.hold(job.blocks)
        self._stores[number] = job.blocks
        self._num_held += len(job.blocks)
        self.tiers.store(number, job.key, job.blocks)

    def stored(self, number: int) -> None:
        """Release an object's pages once the tiers have read them. Idempotent."""
        blocks = self._stores.pop(number, None)
        if blocks is not None:
            self._num_held -= len(blocks)
            self._allocator.pool.release(blocks)

    @property
    def held(self) -> list[tuple[BlockId, ...]]:
        """Pages held for running stores, one tuple per store."""
        return list(self._stores.values())

    def _choose(self, answer: TierAnswer, lookup: _Lookup) -> RemoteKv | None:
        size, tokens = self.tiers.object_blocks, self._object_tokens
        sources = answer.sources[: len(lookup.keys)]  # the answer to an earlier lookup may be longer
        pieces = [Piece(source, tokens, size * self._block_bytes) for source in sources]
        already = lookup.hit_tokens - lookup.first_object * tokens
        pieces[0] = Piece(pieces[0].source, tokens - already, pieces[0].num_bytes)
        decision = self._prices.decide(pieces, lookup.hit_tokens)
        self._decided(answer.request_id, decision)
        count = -(-decision.num_loaded // tokens)
        if count == 0:
            return None
        min_seconds = _FORCED_SECONDS if self._prices.policy is LoadPolicy.ALWAYS else _MIN_SECONDS
        source = TierSource(
            first_object=lookup.first_object,
            keys=lookup.keys[:count],
            sources=sources[:count],
            seconds=max(min_seconds, decision.compute_seconds),
        )
        self.tiers.prefetch(answer.request_id, source)
        first = lookup.first_object
        return RemoteKv((first + count) * tokens, source, sources[0], first_token=first * tokens, has_all_pages=True)
