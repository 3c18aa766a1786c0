"""KV transfers of one engine: loads from peers' offers and from tiers, stores to tiers, KV prefetches.

    arrive         decide whether to fetch a peer's offer; otherwise look in the tiers
    scheduler      plans a load: pages are held, and the loader may write to them
    LoadOutcome    the load ended: the sequence runs with the loaded blocks, or computes them
    PagesQuiet     the transport no longer writes the pages

Owned by the engine's thread, except `post`.
"""

from collections import deque
from collections.abc import Iterable

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockId, RequestId
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.loads.kv_prefetch import KvPrefetch, KvPrefetchRequest
from kvferry.engine.schedule.loads.tier_loads import TierLoads
from kvferry.engine.schedule.plan.scheduler import Scheduler
from kvferry.engine.schedule.step.kv_jobs import LoadJob
from kvferry.engine.schedule.step.kv_progress import RemoteKv
from kvferry.engine.schedule.step.sequence import Sequence
from kvferry.kv.handoff.quarantine import accepts_fetch
from kvferry.kv.interface.connector import KvLoader, LoadOutcome, PagesQuiet
from kvferry.kv.interface.tiering import KvMessage, KvTiers, StoreDone, TierAnswer, TierSource
from kvferry.kv.pages.layer_groups import handed_over
from kvferry.kv.pricing.price import LoadDecision, Piece, PriceBook

_QUARANTINE_SHARE = 0.05


class KvLoads:
    """All running loads, prefetches and stores of one engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        allocator: Allocator,
        *,
        loader: KvLoader | None,
        tiers: KvTiers | None,
        prices: PriceBook,
        block_bytes: int,
    ) -> None:
        """
        Args:
            scheduler: the engine's scheduler; it plans the loads.
            allocator: the engine's pages and prefix caches.
            loader: fetches KV from peers; `None` if this engine does not fetch from peers.
            tiers: KV tiers to load from and store to; `None` without tiers. With neither, prompts are computed, except
                their cached prefixes.
            prices: cost model of loading and computing; updated by each load.
            block_bytes: bytes of one page, for cost estimates.
        """
        self._scheduler = scheduler
        self._allocator = allocator
        self._loader = loader
        self._prices = prices
        self._block_bytes = block_bytes
        self._decisions: list[tuple[RequestId, LoadDecision]] = []
        self._jobs: dict[int, LoadJob] = {}
        self._next_job = 0
        self._prefetches = KvPrefetch(allocator)
        self._inbox: deque[KvMessage] = deque()
        self._tiers: TierLoads | None = None
        if tiers is not None:
            scheduler.blocks.object_blocks = tiers.object_blocks
            allocator.needs.set_boundaries(tiers.object_blocks)
            self._tiers = TierLoads(
                tiers,
                allocator,
                prices,
                block_bytes=block_bytes * len(allocator.windows),
                waits=scheduler.is_waiting,
                answered=scheduler.answered,
                decided=self._note_decision,
            )

    # ------------------------------------------------------------------ requests

    @property
    def can_fetch(self) -> bool:
        """Whether offers of peers can be fetched."""
        return self._loader is not None

    def arrive(self, sequence: Sequence) -> None:
        """Decide whether a new sequence loads its KV from a peer's offer; otherwise look up its KV in the tiers."""
        if sequence.kv.remote is not None and not self._is_worth_fetching(sequence, sequence.kv.remote):
            sequence.kv.drop_remote()
        if sequence.kv.remote is None and self._tiers is not None:
            self._tiers.arrive(sequence)

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Look up the KV of waiting sequences again, because their blocks have new names."""
        for sequence in sequences:
            self.cancel(sequence.request_id)
            self.arrive(sequence)

    def cancel(self, request_id: RequestId) -> None:
        """Cancel the loads of a request that ended; outcomes of these loads are still reported. Idempotent."""
        if self._loader is not None:
            self._loader.cancel(request_id)
        if self._tiers is not None:
            self._tiers.forget(request_id)

    def prefetch(self, request: KvPrefetchRequest) -> None:
        """Fetch blocks into the prefix cache; the outcome is reported with a later step's loads."""
        number = self._take_number()
        job = None
        if self._loader is not None:
            job = self._prefetches.begin(number, request, num_promised=self._scheduler.num_promised)
        if job is None or self._loader is None:
            self._inbox.append(LoadOutcome(request.request_id, number, "too few free pages for a prefetch", 0, 0, 0.0))
            return
        self._loader.start(number, request.request_id, request.source, 0, job.targets)

    # ------------------------------------------------------------------ the step

    def post(self, message: KvMessage) -> None:
        """Enqueue a message for the next step. Thread-safe."""
        self._inbox.append(message)

    @property
    def has_messages(self) -> bool:
        """Whether messages are pending."""
        return bool(self._inbox)

    def take_in(self) -> list[LoadOutcome]:
        """Process the pending messages; return the outcomes of loads among them."""
        outcomes: list[LoadOutcome] = []
        while self._inbox:
            match self._inbox.popleft():
                case LoadOutcome() as outcome:
                    outcomes.append(outcome)
                    self._end_load(outcome)
                case PagesQuiet(number):
                    self._end_write(number)
                case TierAnswer() as answer:
                    self._tiers_or_fail().on_answer(answer)
                case StoreDone(number):
                    self._tiers_or_fail().stored(number)
        return outcomes

    def start_planned(self) -> None:
        """Start the loads that the scheduler has planned, and look up the KV of preempted sequences in the tiers."""
        for job in self._scheduler.take_loads():
            self._start(job)
        preempted = self._scheduler.take_preempted()
        if self._tiers is not None:
            self._tiers.ask_again(preempted)

    def store_full_objects(self) -> None:
        """Start stores of storage objects that became full."""
        for job in self._scheduler.blocks.take_stores():
            if self._tiers is not None:
                self._tiers.store(job)

    def take_decisions(self) -> list[tuple[RequestId, LoadDecision]]:
        """Return the load-or-recompute decisions since the last call."""
        decisions, self._decisions = self._decisions, []
        return decisions

    # ------------------------------------------------------------------ views

    @property
    def num_transfers(self) -> int:
        """Number of loads and prefetches that hold pages or whose transport may still write to pages."""
        return len(self._jobs) + len(self._prefetches)

    @property
    def stores_held(self) -> list[tuple[BlockId, ...]]:
        """Pages held by stores, one tuple per store."""
        return [] if self._tiers is None else self._tiers.held

    @property
    def prefetches_held(self) -> list[tuple[BlockId, ...]]:
        """Pages held by prefetches, one tuple per prefetch."""
        return self._prefetches.held

    # ------------------------------------------------------------------ internals

    def _tiers_or_fail(self) -> TierLoads:
        if self._tiers is None:
            raise InvariantBroken("an engine without tiers received a tier's message")
        return self._tiers

    def _take_number(self) -> int:
        number = self._next_job
        self._next_job += 1
        return number

    def _start(self, job: LoadJob) -> None:
        loader: KvLoader | None = self._loader
        source, first = job.remote.source, job.first_block
        if self._tiers is not None and isinstance(source, TierSource):
            loader, source = self._tiers.tiers, self._tiers.bounded(job, source)
            first *= len(self._allocator.windows)  # tiers number the pages of all groups, block by block
        if loader is None:
            raise InvariantBroken("a load was planned without a loader")
        number = self._take_number()
        pool = self._allocator.pool
        if loader is self._loader and not accepts_fetch(
            num_quarantined=pool.num_quarantined,
            num_blocks=pool.num_blocks,
            num_pages=len(job.targets),
            share=_QUARANTINE_SHARE,
        ):
            full = f"{pool.num_quarantined} of {pool.num_blocks} blocks are waiting for stalled reads"
            why = f"quarantine is full: {full}"
            self._inbox.append(LoadOutcome(job.request_id, number, why, 0, 0, 0.0))  # the job was never started
            return
        self._jobs[number] = job
        pool.begin_write(job.targets)
        loader.start(number, job.request_id, source, first, job.targets)

    def _end_load(self, outcome: LoadOutcome) -> None:
        if self._prefetches.ended(outcome.job, is_good=outcome.failure is None):
            return
        job = self._jobs.get(outcome.job)
        is_tier = job is not None and isinstance(job.remote.source, TierSource)
        for part in outcome.parts:
            self._prices.observe_load(part.source, part.num_bytes, part.seconds)
        if outcome.failure is None:
            if job is None:
                raise InvariantBroken(f"job {outcome.job} succeeded but is not running")
            if not is_tier:
                remote = job.remote
                self._prices.observe_load(remote.label, outcome.num_bytes, outcome.seconds, place=remote.place)
            # A verified read no longer writes to its pages, so the later PagesQuiet message has no effect.
            self._end_write(outcome.job)
            self._scheduler.loaded(outcome.request_id, job.remote.num_tokens, is_stored=is_tier)
        elif job is not None and is_tier and outcome.num_blocks:
            self._end_write(outcome.job)  # a tier's outcome also ends its writes
            num_blocks = outcome.num_blocks // len(self._allocator.windows)
            here = (job.first_block + num_blocks) * self._allocator.block_tokens
            self._scheduler.loaded(outcome.request_id, here, is_stored=True)
        else:
            sequence = self._scheduler.load_failed(outcome.request_id)
            if sequence is not None and not is_tier and self._tiers is not None:
                self._tiers.arrive(sequence)

    def _end_write(self, number: int) -> None:
        job = self._jobs.pop(number, None)
        if job is not None:
            self._allocator.pool.end_write(job.targets)
        else:
            self._prefetches.quiet(number)

    def _is_worth_fetching(self, sequence: Sequence, remote: RemoteKv) -> bool:
        """Return whether fetching a peer's offer is estimated to be faster than computing its tokens beyond the local
        prefix hit."""
        size = self._allocator.block_tokens
        names, limit = sequence.name_blocks(), sequence.num_tokens - 1
        hit = len(self._allocator.peek(names, sequence.sampling.tokens, max_tokens=limit, for_load=True))
        tokens = remote.num_tokens - hit * size
        if tokens <= 0:
            return True  # no pages are fetched, but the load ends the offer at the peer
        blocks = handed_over(remote.num_tokens, self._allocator.windows, size)
        num_bytes = (sum(map(len, blocks)) - hit) * self._block_bytes
        decision = self._prices.decide([Piece(remote.label, tokens, num_bytes, remote.place)], hit * size)
        self._note_decision(sequence.request_id, decision)
        return decision.num_loaded > 0

    def _note_decision(self, request_id: RequestId, decision: LoadDecision) -> None:
        self._decisions.append((request_id, decision))
        first, last = decision.first_token + decision.num_loaded, decision.first_token + decision.num_tokens
        self._scheduler.load_decided(request_id, dearer=range(first, last))
