"""What an engine says to its tiers and hears from them: asks on arrival, decides by price, gives whole objects away.

    blocks      [ b0 b1 | b2 b3 | b4 b5 | b6        2 blocks an object
    local hit   [ b0 b1   b2 ]
    asked for           |  o1   |  o2   |           the first one only for b3
    decided             |  o1   |                   o2 is cheaper to compute

Owned by the engine's thread.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.core.ids import BlockId, RequestId
from kvferry.engine.allocation import Allocator
from kvferry.engine.jobs import StoreJob
from kvferry.engine.sequence import RemoteKv, Sequence
from kvferry.kv.price import Decision, LoadPolicy, Piece, PriceBook
from kvferry.kv.tiering import KvTiers, ObjectKey, TierAnswer, TierSource

_LEAST_SECONDS = 0.1
"""No load is given up earlier: the prices of so short a time are mostly noise."""
_FORCED_SECONDS = 10.0

Answered = Callable[[RequestId, RemoteKv | None], bool]
Decided = Callable[[RequestId, Decision], None]


@dataclass(frozen=True, slots=True)
class _Question:
    first_object: int
    hit_tokens: int
    keys: tuple[ObjectKey, ...]


class TierSide:
    """One engine's tiers, seen from the scheduler."""

    def __init__(
        self,
        tiers: KvTiers,
        allocator: Allocator,
        prices: PriceBook,
        *,
        block_bytes: int,
        answered: Answered,
        decided: Decided,
    ) -> None:
        """
        Args:
            answered: told what a sequence may load, or that there is nothing; see `Scheduler.answered`.
            decided: told every decision.
        """
        self.tiers = tiers
        self._allocator = allocator
        self._prices = prices
        self._block_bytes = block_bytes
        self._object_tokens = tiers.object_blocks * allocator.block_tokens
        self._answered = answered
        self._decided = decided
        self._questions: dict[RequestId, _Question] = {}
        self._stores: dict[int, tuple[BlockId, ...]] = {}
        self._next_store = 0
        self._num_held = 0

    def arrive(self, sequence: Sequence) -> None:
        """Ask what the tiers have of a waiting sequence beyond its local hit, if that can matter."""
        size = self.tiers.object_blocks
        names = sequence.name_blocks()
        hit = len(self._allocator.peek(names, sequence.tokens, max_tokens=sequence.num_tokens - 1))
        first, end = hit // size, (sequence.num_tokens - 1) // self._object_tokens
        if first >= end:
            return
        keys = tuple(ObjectKey(names[(i + 1) * size - 1], sequence.tenant) for i in range(first, end))
        question = _Question(first, hit * self._allocator.block_tokens, keys)
        sequence.is_asking = True
        self._questions[sequence.request_id] = question
        answer = self.tiers.ask(sequence.request_id, keys)
        if answer is not None:
            self.hear(answer)

    def hear(self, answer: TierAnswer) -> None:
        """The tiers' answer: decide, and let the sequence go on."""
        question = self._questions.pop(answer.request_id, None)
        if question is None:
            return  # aborted meanwhile
        remote = self._choose(answer, question) if answer.sources else None
        self._answered(answer.request_id, remote)

    def forget(self, request_id: RequestId) -> None:
        """The request has ended."""
        self._questions.pop(request_id, None)
        self.tiers.cancel(request_id)

    def store(self, job: StoreJob) -> None:
        """Give an object away if the tiers want it and not too many pages are held for such already."""
        if self._num_held + len(job.blocks) > self._allocator.pool.num_blocks * self.tiers.held_share:
            return
        if not self.tiers.wants(job.key):
            return
        number = self._next_store
        self._next_store += 1
        self._allocator.pool.hold(job.blocks)
        self._stores[number] = job.blocks
        self._num_held += len(job.blocks)
        self.tiers.store(number, job.key, job.blocks)

    def stored(self, number: int) -> None:
        """The tiers have read an object's pages. Idempotent."""
        blocks = self._stores.pop(number, None)
        if blocks is not None:
            self._num_held -= len(blocks)
            self._allocator.pool.release(blocks)

    @property
    def held(self) -> list[tuple[BlockId, ...]]:
        """Pages held for stores."""
        return list(self._stores.values())

    def _choose(self, answer: TierAnswer, question: _Question) -> RemoteKv | None:
        size, tokens = self.tiers.object_blocks, self._object_tokens
        pieces = [Piece(source, tokens, size * self._block_bytes) for source in answer.sources]
        already = question.hit_tokens - question.first_object * tokens
        pieces[0] = Piece(pieces[0].source, tokens - already, pieces[0].num_bytes)
        decision = self._prices.decide(pieces, question.hit_tokens)
        self._decided(answer.request_id, decision)
        count = -(-decision.num_loaded // tokens)
        if count == 0:
            return None
        least = _FORCED_SECONDS if self._prices.policy is LoadPolicy.ALWAYS else _LEAST_SECONDS
        source = TierSource(
            first_object=question.first_object,
            keys=question.keys[:count],
            sources=answer.sources[:count],
            seconds=max(least, decision.compute_seconds),
        )
        self.tiers.prefetch(answer.request_id, source)
        first = question.first_object
        return RemoteKv((first + count) * tokens, source, answer.sources[0], first_token=first * tokens)
