"""One engine: joins the scheduler, the runner and the connector's scheduler side into `step`.

Owned by one thread: every method but `post` must be called on it. `post` is how the connector's threads
leave a message for the next step.
"""

from collections import deque
from collections.abc import Callable, Mapping

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.epochs import EpochTable
from kvferry.core.errors import InvalidRequest, InvariantBroken, Overloaded
from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import BlockId, RequestId
from kvferry.engine.ahead import Ahead, AheadRequest
from kvferry.engine.allocation import Allocator
from kvferry.engine.blocks import BlockPool
from kvferry.engine.jobs import Export, LoadJob
from kvferry.engine.messages import EngineLoad, EngineRequest, StepOutput
from kvferry.engine.pipeline import Pipeline, StepRunner
from kvferry.engine.prefix_index import PrefixIndex
from kvferry.engine.room import SchedulerLimits
from kvferry.engine.scheduler import Scheduler, SequenceUpdate
from kvferry.engine.sequence import RemoteKv, Sequence
from kvferry.engine.step import StepPlan
from kvferry.engine.tier_side import TierSide
from kvferry.kv.connector import KvLoader, LoadOutcome, PagesQuiet
from kvferry.kv.price import Decision, LoadPolicy, Piece, PriceBook
from kvferry.kv.quarantine import accepts_fetch
from kvferry.kv.tiering import KvTiers, StoreDone, TierAnswer, TierSource

_MAX_NAMERS = 1024
_QUARANTINE_SHARE = 0.05


class Engine:
    """A paged engine over one model."""

    def __init__(
        self,
        runner: StepRunner,
        *,
        num_blocks: int,
        block_tokens: int,
        max_model_tokens: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        fingerprint: bytes,
        limits: SchedulerLimits,
        tenant_secret: Callable[[str], bytes],
        epochs: EpochTable | None = None,
        max_waiting: int = 1024,
        block_bytes: int = 1,
        prices: PriceBook | None = None,
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            max_model_tokens: prompt and output together; never more than the pool can hold.
            fingerprint: of the KV layout; part of every block's name.
            tenant_secret: the secret that keys a tenant's block names.
            epochs: the transport's epoch table.
            max_waiting: requests that may wait for room before new ones are refused.
            block_bytes: of a page, for prices.
            prices: what loading and computing take; learned here from each step and load. Default: load always.
            clock: times the steps.
        """
        index = PrefixIndex()
        pool = BlockPool(num_blocks, epochs=epochs, on_reuse=index.forget)
        self.allocator = Allocator(pool, index, block_tokens=block_tokens)
        self.scheduler = Scheduler(limits, self.allocator)
        self.max_model_tokens = min(max_model_tokens, num_blocks * block_tokens)
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._pipeline = Pipeline(runner)
        self._fingerprint = fingerprint
        self._tenant_secret = tenant_secret
        self._namers: dict[str, BlockNamer] = {}
        self._max_waiting = max_waiting
        self._block_bytes = block_bytes
        self._prices = prices or PriceBook(LoadPolicy.ALWAYS)
        self._clock = clock or SystemClock()
        self._decisions: list[tuple[RequestId, Decision]] = []
        self._loader: KvLoader | None = None
        self._tiers: TierSide | None = None
        self._jobs: dict[int, LoadJob] = {}
        self._next_job = 0
        self._ahead = Ahead(self.allocator)
        self._exports: dict[int, tuple[BlockId, ...]] = {}
        self._next_export = 0
        self._inbox: deque[object] = deque()

    def attach_loader(self, loader: KvLoader) -> None:
        """Give the engine the means to fetch KV; without it, requests that could fetch compute instead."""
        self._loader = loader

    def attach_tiers(self, tiers: KvTiers) -> None:
        """Give the engine tiers to load from and to store to."""
        self.scheduler.object_blocks = tiers.object_blocks
        self._tiers = TierSide(
            tiers,
            self.allocator,
            self._prices,
            block_bytes=self._block_bytes,
            answered=self.scheduler.answered,
            decided=self._note_decision,
        )

    # ------------------------------------------------------------------ requests

    def add(self, request: EngineRequest) -> None:
        """Take a request.

        Raises:
            InvalidRequest: it can never run; the field says which part.
            Overloaded: too many wait already.
        """
        self._check(request)
        if self.scheduler.num_waiting >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} requests are waiting already", retry_after_seconds=1.0)
        num_prompt = len(request.token_ids) - request.num_generated
        limit = request.sampling.max_tokens
        total = self.max_model_tokens if limit is None else min(self.max_model_tokens, num_prompt + limit)
        sequence = Sequence(
            request_id=request.request_id,
            tokens=list(request.token_ids),
            num_prompt=num_prompt,
            sampling=request.sampling,
            namer=self.namer(request.tenant),
            max_tokens_total=total,
            eos_token_ids=self._eos,
            sample_index=request.sample_index,
            tenant=request.tenant,
            exports=request.exports,
            keeps=request.keeps,
            remote=request.remote if self._loader is not None else None,
        )
        self.scheduler.add(sequence)
        if sequence.remote is not None and not self._is_worth_fetching(sequence, sequence.remote):
            sequence.remote = None
        if sequence.remote is None and self._tiers is not None:
            self._tiers.arrive(sequence)

    def abort(self, request_id: RequestId) -> bool:
        """End a request now; whether it was here. Idempotent."""
        if self._loader is not None:
            self._loader.cancel(request_id)
        if self._tiers is not None:
            self._tiers.forget(request_id)
        return self.scheduler.abort(request_id)

    def fetch_ahead(self, request: AheadRequest) -> None:
        """Fetch blocks into the prefix cache for whoever comes; the outcome is among the next step's loads."""
        number = self._next_job
        self._next_job += 1
        job = None if self._loader is None else self._ahead.begin(number, request)
        if job is None or self._loader is None:
            self._inbox.append(LoadOutcome(request.request_id, number, "no room for a head start", 0, 0, 0.0))
            return
        self._loader.start(number, request.request_id, request.source, 0, job.targets)

    def namer(self, tenant: str) -> BlockNamer:
        """What names this tenant's blocks."""
        namer = self._namers.get(tenant)
        if namer is None:
            if len(self._namers) >= _MAX_NAMERS:
                self._namers.pop(next(iter(self._namers)))  # made anew when that tenant comes back
            namer = BlockNamer(
                tenant=self._tenant_secret(tenant),
                fingerprint=self._fingerprint,
                block_tokens=self.allocator.block_tokens,
            )
            self._namers[tenant] = namer
        return namer

    # ------------------------------------------------------------------ the step

    def step(self) -> StepOutput:
        """Take in what the connector left, plan, compute, book. Does nothing when nothing can run. One more
        may be launched before it is booked (`pipeline`)."""
        loads = self._take_in()
        self._give_away()  # what a peer's pages made whole: `schedule` may preempt it and reuse them
        plan = self._pipeline.take(self.scheduler.is_wanted) or self.scheduler.schedule()
        for job in self.scheduler.take_loads():
            self._start(job)
        updates = self._run(plan) if plan.scheduled else []
        exports = {u.request_id: self._keep_export(u.export) for u in updates if u.export is not None}
        self._give_away()
        decisions, self._decisions = self._decisions, []
        changes = self.allocator.index.take_changes()
        progress = self.scheduler.take_progress()
        return StepOutput(updates, exports, loads, decisions, progress, changes, ran=bool(plan.scheduled))

    @property
    def has_work(self) -> bool:
        """Whether `step` could do something now. Sequences that only wait for a connector do not count."""
        return bool(self._inbox or self.scheduler.num_running or self.scheduler.num_waiting)

    def post(self, message: object) -> None:
        """Leave a message for the next step; from any thread. The caller wakes the engine's thread."""
        self._inbox.append(message)

    # ------------------------------------------------------------------ exports

    def release_export(self, number: int) -> None:
        """Give exported pages back. Idempotent."""
        blocks = self._exports.pop(number, None)
        if blocks is not None:
            self.allocator.pool.release(blocks)

    # ------------------------------------------------------------------ views

    def load(self) -> EngineLoad:
        """A snapshot of everything held."""
        pool = self.allocator.pool
        return EngineLoad(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            loading=self.scheduler.num_loading,
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_quarantined=pool.num_quarantined,
            exports=len(self._exports),
            exported_blocks=sum(map(len, self._exports.values())),
            transfers=len(self._jobs) + len(self._ahead),
            stores=len(self._stores_held()),
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held: no sequence, no export, no transfer, no store, every page free."""
        held = self._exports or self._jobs or len(self._ahead)
        return self.scheduler.is_idle and not held and self.allocator.pool.is_idle

    def check_integrity(self) -> None:
        """The pool's laws, and I4: a page's references are exactly those of tables, exports, stores, fetches ahead.

        Raises:
            InvariantBroken: with the numbers.
        """
        self.allocator.check_integrity()
        counted: dict[BlockId, int] = {}
        tables = (t.blocks for t in self.scheduler.tables())
        for blocks in [*tables, *self._exports.values(), *self._stores_held(), *self._ahead.held]:
            for block in blocks:
                counted[block] = counted.get(block, 0) + 1
        pool = self.allocator.pool
        wrong = {b: (counted.get(b, 0), pool.refs(b)) for b in map(BlockId, range(pool.num_blocks))}
        bad = {b: v for b, v in wrong.items() if v[0] != v[1]}
        if bad:
            raise InvariantBroken(f"references of blocks (owners, counted): {dict(list(bad.items())[:8])}")

    # ------------------------------------------------------------------ inside

    def _keep_export(self, export: Export) -> int:
        number = self._next_export
        self._next_export += 1
        self._exports[number] = export.blocks
        return number

    def _check(self, request: EngineRequest) -> None:
        count = len(request.token_ids)
        if count - request.num_generated < 1:
            raise InvalidRequest("the prompt is empty; send at least one token", field="prompt", reason="PROMPT_EMPTY")
        if count >= self.max_model_tokens:
            raise InvalidRequest(
                f"the prompt has {count} tokens, the context holds {self.max_model_tokens}, and at least one must be "
                "left for the answer; shorten the prompt",
                field="prompt",
                reason="PROMPT_TOO_LONG",
            )
        if not request.sampling.is_greedy and request.sampling.seed is None:
            # The edge draws one, so that a request draws the same tokens wherever it goes.
            raise InvalidRequest("seed is missing; a request with a temperature brings one", field="seed")
        if min(request.token_ids) < 0 or max(request.token_ids) >= self._vocab_size:
            raise InvalidRequest(f"token ids must be from 0 to {self._vocab_size - 1}", field="token_ids")

    def _give_away(self) -> None:
        for whole in self.scheduler.take_stores():
            if self._tiers is not None:
                self._tiers.store(whole)

    def _run(self, plan: StepPlan) -> list[SequenceUpdate]:
        begun = self._clock.monotonic()
        result = self._pipeline.run(plan, lambda: self._follow(plan))
        chunks = [item for item in plan.scheduled if item.num_scheduled > 1]
        if len(chunks) == 1:  # whatever ran beside it is the load under which a prompt is computed here
            seconds = self._clock.monotonic() - begun
            self._prices.observe_compute(chunks[0].num_computed, chunks[0].num_scheduled, seconds)
        return self.scheduler.update(plan, result)

    def _follow(self, plan: StepPlan) -> StepPlan | None:
        """The step after one under way. Nothing outside the device may read or write pages then: a step ahead may still
        write a page that was given back."""
        if self._loader is not None or self._tiers is not None or self._inbox:
            return None
        return self.scheduler.follow(plan)

    def _take_in(self) -> list[LoadOutcome]:
        outcomes: list[LoadOutcome] = []
        while self._inbox:
            match self._inbox.popleft():
                case LoadOutcome() as outcome:
                    outcomes.append(outcome)
                    self._end_load(outcome)
                case PagesQuiet(number):
                    self._end_write(number)
                case TierAnswer() as answer if self._tiers is not None:
                    self._tiers.hear(answer)
                case StoreDone(number) if self._tiers is not None:
                    self._tiers.stored(number)
                case message:
                    raise InvariantBroken(f"unknown message {type(message).__name__}")
        return outcomes

    def _end_load(self, outcome: LoadOutcome) -> None:
        if self._ahead.ended(outcome.job, is_good=outcome.failure is None):
            return
        job = self._jobs.get(outcome.job)
        is_tier = job is not None and isinstance(job.remote.source, TierSource)
        for part in outcome.parts:
            self._prices.observe_load(part.source, part.num_bytes, part.seconds)
        if outcome.failure is None:
            if job is None:
                raise InvariantBroken(f"job {outcome.job} succeeded, and is not running")
            if not is_tier:
                remote = job.remote
                self._prices.observe_load(remote.label, outcome.num_bytes, outcome.seconds, place=remote.place)
            # A verified read is over as surely as a quiet one; its PagesQuiet then finds nothing left to do.
            self._end_write(outcome.job)
            self.scheduler.loaded(outcome.request_id, job.remote.num_tokens, is_stored=is_tier)
        elif job is not None and is_tier and outcome.num_blocks:
            self._end_write(outcome.job)  # a tier's reads are over when it says how they went
            here = (job.first_block + outcome.num_blocks) * self.allocator.block_tokens
            self.scheduler.loaded(outcome.request_id, here, is_stored=True)
        else:
            sequence = self.scheduler.load_failed(outcome.request_id)
            if sequence is not None and not is_tier and self._tiers is not None:
                self._tiers.arrive(sequence)

    def _end_write(self, number: int) -> None:
        job = self._jobs.pop(number, None)
        if job is not None:
            self.allocator.pool.end_write(job.targets)
        else:
            self._ahead.quiet(number)

    def _is_worth_fetching(self, sequence: Sequence, remote: RemoteKv) -> bool:
        """Whether a peer's offer is cheaper than computing what it covers beyond the local hit."""
        size = self.allocator.block_tokens
        hit = len(self.allocator.peek(sequence.name_blocks(), sequence.tokens, max_tokens=sequence.num_tokens - 1))
        tokens = remote.num_tokens - hit * size
        if tokens <= 0:
            return True  # nothing to fetch, but the peer will be told
        num_bytes = (self.allocator.blocks_for(remote.num_tokens) - hit) * self._block_bytes
        decision = self._prices.decide([Piece(remote.label, tokens, num_bytes, remote.place)], hit * size)
        self._note_decision(sequence.request_id, decision)
        return decision.num_loaded > 0

    def _note_decision(self, request_id: RequestId, decision: Decision) -> None:
        self._decisions.append((request_id, decision))

    def _stores_held(self) -> list[tuple[BlockId, ...]]:
        return [] if self._tiers is None else self._tiers.held

    def _start(self, job: LoadJob) -> None:
        loader = (
            self._tiers.tiers if self._tiers is not None and isinstance(job.remote.source, TierSource) else self._loader
        )
        if loader is None:
            raise InvariantBroken("a load was planned without a loader")
        number = self._next_job
        self._next_job += 1
        pool = self.allocator.pool
        if loader is self._loader and not accepts_fetch(
            num_quarantined=pool.num_quarantined,
            num_blocks=pool.num_blocks,
            num_wanted=len(job.targets),
            share=_QUARANTINE_SHARE,
        ):
            why = f"quarantine is full: {pool.num_quarantined} of {pool.num_blocks} blocks wait for stalled reads"
            self._inbox.append(LoadOutcome(job.request_id, number, why, 0, 0, 0.0))  # of a job that never ran
            return
        self._jobs[number] = job
        self.allocator.pool.begin_write(job.targets)
        loader.start(number, job.request_id, job.remote.source, job.first_block, job.targets)


def one_secret(secret: bytes, tenants: Mapping[str, bytes] | None = None) -> Callable[[str], bytes]:
    """A tenant's own secret if it has one, else the common secret joined with the tenant's name."""
    own = dict(tenants or {})
    return lambda tenant: own.get(tenant, secret + b"\x00" + tenant.encode())
