"""One engine: joins the scheduler, the runner and the connector's scheduler side into `step`.

Owned by one thread: every method but `post` must be called on it. `post` is how the connector's threads
leave a message for the next step.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvferry.core.epochs import EpochTable
from kvferry.core.errors import InvalidRequest, InvariantBroken, Overloaded
from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import BlockId, RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.allocation import Allocator
from kvferry.engine.blocks import BlockPool
from kvferry.engine.prefix_index import CacheChange, PrefixIndex
from kvferry.engine.scheduler import Export, LoadJob, Scheduler, SchedulerLimits, SequenceUpdate
from kvferry.engine.sequence import RemoteKv, Sequence
from kvferry.engine.step import StepPlan, StepResult
from kvferry.kv.connector import KvLoader, LoadOutcome, PagesQuiet
from kvferry.kv.quarantine import accepts_fetch


class StepRunner(Protocol):
    """What the engine needs of `engine.runner.Runner`."""

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        ...


_MAX_NAMERS = 1024
_QUARANTINE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to continue."""

    request_id: RequestId
    token_ids: list[int]
    """Prompt, then what was generated before (a stream that moved here)."""
    sampling: SamplingParams
    num_generated: int = 0
    sample_index: int = 0
    tenant: str = ""
    exports: bool = False
    """Draw one token, then leave the pages to an offer."""
    remote: RemoteKv | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Every countable thing that a request holds in the engine."""

    running: int
    waiting: int
    loading: int
    blocks_total: int
    blocks_free: int
    blocks_quarantined: int
    exports: int
    transfers: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step brought."""

    updates: list[SequenceUpdate]
    exports: dict[RequestId, int]
    """Numbers of the exports that this step made; whoever reads this now owns them (`release_export`)."""
    loads: list[LoadOutcome]
    cache_changes: list[CacheChange]
    """Named blocks that came into the prefix cache or left it, in order."""
    ran: bool
    """Whether anything was computed; if not, only a new message or a freed page can change that."""


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
    ) -> None:
        """
        Args:
            max_model_tokens: prompt and output together; never more than the pool can hold.
            fingerprint: of the KV layout; part of every block's name.
            tenant_secret: the secret that keys a tenant's block names.
            epochs: the transport's epoch table.
            max_waiting: requests that may wait for room before new ones are refused.
        """
        index = PrefixIndex()
        pool = BlockPool(num_blocks, epochs=epochs, on_reuse=index.forget)
        self.allocator = Allocator(pool, index, block_tokens=block_tokens)
        self.scheduler = Scheduler(limits, self.allocator)
        self.max_model_tokens = min(max_model_tokens, num_blocks * block_tokens)
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._runner = runner
        self._fingerprint = fingerprint
        self._tenant_secret = tenant_secret
        self._namers: dict[str, BlockNamer] = {}
        self._max_waiting = max_waiting
        self._loader: KvLoader | None = None
        self._jobs: dict[int, LoadJob] = {}
        self._next_job = 0
        self._exports: dict[int, tuple[BlockId, ...]] = {}
        self._next_export = 0
        self._inbox: deque[LoadOutcome | PagesQuiet] = deque()

    def attach_loader(self, loader: KvLoader) -> None:
        """Give the engine the means to fetch KV; without it, requests that could fetch compute instead."""
        self._loader = loader

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
        self.scheduler.add(
            Sequence(
                request_id=request.request_id,
                tokens=list(request.token_ids),
                num_prompt=num_prompt,
                sampling=request.sampling,
                namer=self.namer(request.tenant),
                max_tokens_total=total,
                eos_token_ids=self._eos,
                sample_index=request.sample_index,
                exports=request.exports,
                remote=request.remote if self._loader is not None else None,
            )
        )

    def abort(self, request_id: RequestId) -> bool:
        """End a request now; whether it was here. Idempotent."""
        if self._loader is not None:
            self._loader.cancel(request_id)
        return self.scheduler.abort(request_id)

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
        """Take in what the connector left, plan, compute, book. Does nothing when nothing can run."""
        loads = self._take_in()
        plan = self.scheduler.schedule()
        for job in self.scheduler.take_loads():
            self._start(job)
        if not plan.scheduled:
            return StepOutput([], {}, loads, self.allocator.index.take_changes(), ran=False)
        updates = self.scheduler.update(plan, self._runner.run(plan))
        exports = {u.request_id: self._keep_export(u.export) for u in updates if u.export is not None}
        return StepOutput(updates, exports, loads, self.allocator.index.take_changes(), ran=True)

    @property
    def has_work(self) -> bool:
        """Whether `step` could do something now. Sequences that only wait for a connector do not count."""
        return bool(self._inbox or self.scheduler.num_running or self.scheduler.num_waiting)

    def post(self, message: LoadOutcome | PagesQuiet) -> None:
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
            transfers=len(self._jobs),
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held: no sequence, no export, no transfer, every page free."""
        return self.scheduler.is_idle and not self._exports and not self._jobs and self.allocator.pool.is_idle

    def check_integrity(self) -> None:
        """The pool's laws, and I4: a page's references are exactly those of tables and exports.

        Raises:
            InvariantBroken: with the numbers.
        """
        self.allocator.check_integrity()
        counted: dict[BlockId, int] = {}
        for blocks in [*(t.blocks for t in self.scheduler.tables()), *self._exports.values()]:
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

    def _take_in(self) -> list[LoadOutcome]:
        outcomes: list[LoadOutcome] = []
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, LoadOutcome):
                outcomes.append(message)
                if message.failure is not None:
                    self.scheduler.load_failed(message.request_id)
                    continue
            # A verified read is over as surely as a quiet one; its PagesQuiet then finds nothing left to do.
            job = self._jobs.pop(message.job, None)
            if job is None:
                continue
            self.allocator.pool.end_write(job.targets)
            if isinstance(message, LoadOutcome):
                self.scheduler.loaded(message.request_id, job.num_tokens)
        return outcomes

    def _start(self, job: LoadJob) -> None:
        if self._loader is None:
            raise InvariantBroken("a load was planned without a loader")
        number = self._next_job
        self._next_job += 1
        pool = self.allocator.pool
        if not accepts_fetch(
            num_quarantined=pool.num_quarantined,
            num_blocks=pool.num_blocks,
            num_wanted=len(job.targets),
            share=_QUARANTINE_SHARE,
        ):
            why = f"quarantine is full: {pool.num_quarantined} of {pool.num_blocks} blocks wait for stalled reads"
            self._inbox.append(LoadOutcome(job.request_id, number, why, 0, 0, 0.0))
            return
        self._jobs[number] = job
        self.allocator.pool.begin_write(job.targets)
        self._loader.start(number, job.request_id, job.source, job.first_block, job.targets)


def one_secret(secret: bytes, tenants: Mapping[str, bytes] | None = None) -> Callable[[str], bytes]:
    """A tenant's own secret if it has one, else the common secret joined with the tenant's name."""
    own = dict(tenants or {})
    return lambda tenant: own.get(tenant, secret + b"\x00" + tenant.encode())
