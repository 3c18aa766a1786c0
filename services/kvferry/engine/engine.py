"""The engine: combines scheduler, runner and KV loads; `step` runs one iteration.

The engine is owned by one thread, which calls all methods except `post`. Threads of loaders and tiers call `post` to
enqueue a message for the next step.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from kvferry.core.errors import InvalidRequest, KvferryError, Overloaded, Unavailable, UnknownModel, shortened
from kvferry.core.hashing import BlockNamer, is_scope_of
from kvferry.core.ids import AdapterId, BlockId, RequestId
from kvferry.core.load import WorkerLoad
from kvferry.core.pausing import WeightVersion
from kvferry.engine.execute.grammar.grammar_masks import GrammarMasks
from kvferry.engine.observe.engine_load import engine_load
from kvferry.engine.observe.engine_statistics import EngineStatistics
from kvferry.engine.observe.watch import COMPUTE, MESSAGES, NO_WATCH, PLAN, RECORD, StepWatch
from kvferry.engine.parts import EngineParts
from kvferry.engine.schedule.adapters.activation import AdapterActivation
from kvferry.engine.schedule.adapters.adapter_store import AdapterInfo, LoadedAdapter
from kvferry.engine.schedule.loads.kv_prefetch import NO_JOB, KvPrefetchRequest
from kvferry.engine.schedule.messages import EngineRequest, NewWeights, StepOutput
from kvferry.engine.schedule.pausing import Pausing
from kvferry.engine.schedule.pins.pinning import Pinning
from kvferry.engine.schedule.pins.pins import PageUses
from kvferry.engine.schedule.pins.retaining import Retaining
from kvferry.engine.schedule.plan.prompt_length import check_length
from kvferry.engine.schedule.speculation.speculation import Speculation
from kvferry.engine.schedule.step.kv_jobs import Export, SequenceUpdate
from kvferry.engine.schedule.step.prompt_pooling import PromptPooling
from kvferry.engine.schedule.step.sequence import Sequence
from kvferry.engine.schedule.step.sequence_request import SequenceRequest
from kvferry.engine.schedule.step.step import StepPlan
from kvferry.engine.schedule.step.token_mask import TokenMask
from kvferry.kv.interface.connector import LoadOutcome
from kvferry.kv.interface.tiering import KvMessage
from kvferry.text.requests.prompt_parameters import check_prompt_logprobs


def _unobserved(_started: list[RequestId]) -> None:
    pass


class Engine:
    """Inference engine with a paged KV cache for one model."""

    def __init__(self, parts: EngineParts) -> None:
        """
        Args:
            parts: the finished parts (`parts.assemble`).
        """
        self.allocator, self.scheduler = parts.allocator, parts.scheduler
        self._model, self._namers, self._masks = parts.model, parts.namers, parts.masks
        self._eos = frozenset(parts.model.eos_token_ids)
        self._pipeline, self._loads, self._prices = parts.pipeline, parts.loads, parts.prices
        self._max_waiting, self._clock = parts.max_waiting, parts.clock
        adapters = parts.adapters
        self.adapters = None if adapters is None else adapters.store
        """The registered adapters; `None` if the engine does not support adapters."""
        self._load_adapter = _loads_nothing if adapters is None else adapters.load
        self.max_model_tokens = min(
            parts.model.max_model_tokens, self.allocator.needs.max_tokens(self.allocator.pool.num_blocks)
        )
        self.statistics = EngineStatistics()
        self._exports: dict[int, tuple[BlockId, ...]] = {}
        self.num_exports = 0
        """Number of exports so far, which is also the number of the next export."""
        self._activation = AdapterActivation(
            self.scheduler, self.adapters, None if adapters is None else adapters.activate, self._clock, self._end
        )
        self._pinned = PageUses()
        """The pages that pins or retentions hold."""
        self.pinning = Pinning(
            self.allocator, share=parts.pin_share, room=lambda: self._spare_pages,
            clock=self._clock, add=self.add, check=self._check, namer=self.namer, all_uses=self._pinned,
        )  # fmt: skip
        """Pinned prefixes."""
        self.retaining = Retaining(
            self.allocator, share=parts.retention_share, room=lambda: self._spare_pages - self.pinning.pins.quota,
            clock=self._clock, namer=self.namer, all_uses=self._pinned,
        )  # fmt: skip
        """Prompts whose blocks are kept because their requests asked for it."""
        self.pausing = Pausing(self.scheduler, add=self.add, end=self._end)
        """The pause of generation, with the requests that it holds."""
        self._weights = WeightVersion(parts.model.weight_version)
        self.failed_step: frozenset[RequestId] = frozenset()
        """Requests of the step that raised an exception; empty if no step did."""
        self.watch: StepWatch = NO_WATCH

    # ------------------------------------------------------------------ requests

    def add(self, request: EngineRequest) -> None:
        """Accept a request.

        Raises:
            InvalidRequest: the request can never run; `field` is the invalid field.
            Overloaded: too many requests are waiting.
        """
        self._check(request)
        if self.scheduler.num_waiting + self.pausing.num_held >= self._max_waiting:
            raise Overloaded(f"the queue is full: {self._max_waiting} requests are waiting", retry_after_seconds=1.0)
        if self.pausing.takes(request):
            return
        num_prompt = len(request.token_ids) - request.num_generated
        limit = request.sampling.max_tokens
        total = self.max_model_tokens if limit is None else min(self.max_model_tokens, num_prompt + limit)
        asked = SequenceRequest(
            request.request_id,
            num_prompt,
            request.sampling,
            self.namer(request.scope),
            adapter=request.adapter,
            max_tokens_total=total,
            eos_token_ids=self._eos,
            sample_index=request.sample_index,
            priority=request.priority,
            latest_start=self._latest_start(request),
            scope=request.scope,
            exports=request.exports,
            keeps=request.keeps,
        )
        sequence = Sequence(
            asked,
            list(request.token_ids),
            remote=request.remote if self._loads.can_fetch else None,
            mask=self._first_mask(request, num_prompt),
            pooling=None if request.pooling is None else PromptPooling(request.pooling, num_prompt),
        )
        if not sequence.sampling.may_load:
            sequence.kv.drop_remote()
        self.scheduler.add(sequence)
        self.statistics.arrive(request.request_id, num_prompt, self._clock.monotonic())
        self.watch.added(request, total)
        if sequence.sampling.may_load:
            self._loads.arrive(sequence)
        self.retaining.add(request)

    def abort(self, request_id: RequestId) -> bool:
        """Abort a request; return whether it existed. Idempotent."""
        self.pinning.forget(request_id)
        return self.pausing.forget(request_id) or self._end(request_id)

    def _end(self, request_id: RequestId) -> bool:
        self.retaining.forget(request_id)
        self._loads.cancel(request_id)
        self.statistics.forget(request_id)
        self.watch.aborted(request_id)
        return self.scheduler.abort(request_id)

    def prefetch_kv(self, request: KvPrefetchRequest) -> None:
        """Fetch blocks into the prefix cache; the outcome is reported with a later step's loads."""
        if self.pausing.mode is not None:
            self._loads.post(LoadOutcome(request.request_id, NO_JOB, "generation is paused", 0, 0, 0.0))
        else:
            self._loads.prefetch(request)

    # ------------------------------------------------------------------ weights

    @property
    def weights(self) -> WeightVersion:
        """The weights that the next step computes with."""
        return self._weights

    def change_weights(self, weights: NewWeights) -> int:
        """Compute with other weights from the next step on, and return the number of sequences that continue with them:
        their tokens stay, and their KV is computed again. No KV of the previous weights is found any more.

        Raises:
            Unavailable: generation is not paused, or a step or a load is in flight.
            InvalidRequest: adapters are loaded, which are packed for the model with the previous weights.
        """
        if not self.is_pause_settled:
            raise Unavailable(
                "weights change only while generation is paused and nothing is in flight; pause, then retry",
                reason="NOT_PAUSED",
            )
        if self.adapter_infos:
            raise InvalidRequest(
                "weights do not change while adapters are loaded; unload the adapters, then retry",
                reason="WEIGHTS_NOT_SUPPORTED",
            )
        weights.install()
        self.scheduler.accounts.weights_changed(self._namer_of(self._model.fingerprint))
        self._model = replace(self._model, fingerprint=weights.fingerprint)
        self._weights = WeightVersion(weights.name, self._weights.number + 1)
        self.pausing.forget_remote()
        sequences = self.scheduler.restart(self.namer)
        self.reset_prefix_cache()
        self._loads.restart(sequences)
        return len(sequences)

    def namer(self, scope: str) -> BlockNamer:
        """Return the block namer of a cache scope, for the engine's KV layout."""
        return self._namer_of(self._model.fingerprint)(scope)

    def _namer_of(self, fingerprint: bytes) -> Callable[[str], BlockNamer]:
        return partial(self._namers.of, fingerprint=fingerprint, block_tokens=self.allocator.block_tokens)

    # ------------------------------------------------------------------ the step

    def step(self, on_started: Callable[[list[RequestId]], None] = _unobserved) -> StepOutput:
        """Process messages of loaders and tiers, plan a step, compute it and record its results. If no sequence can
        run, no step is computed. The next step may be launched before this one is recorded (`pipeline`).

        Args:
            on_started: called before the step is computed with the requests that take part in a step for the first
                time, if there are any.
        """
        self.watch.phase(MESSAGES)
        outcomes = self._loads.take_in()
        self._loads.store_full_objects()  # before `schedule`, which may preempt a sequence and reuse its pages
        self.watch.phase(PLAN)
        self.allocator.index.removed.at(self._clock.monotonic())
        self._expire_pins()
        plan = self._pipeline.take(self.scheduler.has_sequence) or self._next_plan()
        self._loads.start_planned()
        self._activation.apply()
        for adapter, folder in self._activation.take_wanted():
            if (loaded := self._load_adapter(adapter, folder)) is not None:
                self.adapter_loaded(adapter, loaded)
        failed = self._activation.take_failed()
        started = self.scheduler.take_started()
        if started:
            on_started(started)
        now = self._clock.monotonic()
        overdue = self.scheduler.take_overdue(now)
        self.statistics.start(started, now)
        for update in (*failed, *overdue):
            self.statistics.forget(update.request_id)
        ended = self.pausing.take_ended()
        updates = [*ended, *failed, *overdue, *(self._run(plan) if plan.scheduled else [])]
        self.pinning.ended(updates)
        retained = self.retaining.stepped(updates)
        exports = {u.request_id: self._keep_export(u.export) for u in updates if u.export is not None}
        self._loads.store_full_objects()
        self.watch.stepped(plan, updates, is_ahead=self._pipeline.is_ahead)
        changes, progress = self.allocator.index.take_changes(), self.scheduler.blocks.take_progress()
        decisions = self._loads.take_decisions()
        return StepOutput(updates, exports, outcomes, decisions, progress, changes, retained, ran=bool(plan.scheduled))

    @property
    def has_work(self) -> bool:
        """Whether `step` has work now; sequences that wait for a load do not count."""
        has_sequences = self.pausing.plans_steps and (self.scheduler.num_running or self.scheduler.num_waiting)
        has_results = self._loads.has_messages or self._pipeline.is_ahead or self.allocator.index.has_changes
        has_results = has_results or self._activation.has_failed or self.pausing.has_ended
        return has_results or bool(has_sequences) or self.pin_seconds_left == 0.0

    def post(self, message: KvMessage) -> None:
        """Enqueue a message for the next step. Thread-safe; the caller must notify the engine's thread."""
        self._loads.post(message)

    # ------------------------------------------------------------------ exports

    def release_export(self, number: int) -> None:
        """Free the pages of an export. Idempotent."""
        self.watch.released(number)
        blocks = self._exports.pop(number, None)
        if blocks is not None:
            self.allocator.pool.release(blocks)

    # ------------------------------------------------------------------ adapters

    def change_adapter(self, name: str, loaded: LoadedAdapter | None) -> AdapterId:
        """Register, replace or remove an adapter; see `AdapterActivation.change`. Pins of its other versions end."""
        adapter = self._activation.change(name, loaded)
        kept = None if loaded is None else adapter
        self.pinning.keep_version(name, kept)
        self.retaining.keep_version(name, kept)
        return adapter

    def adapter_loaded(self, adapter: AdapterId, outcome: LoadedAdapter | KvferryError) -> None:
        """Take an adapter that `load_adapter` has loaded, or the error. Its sequences are admitted, or end, in the next
        step."""
        self._activation.loaded(adapter, outcome)

    # ------------------------------------------------------------------ the prefix cache

    def close_pins(self) -> None:
        """End all pins and retentions and refuse further ones, because the worker drains."""
        self.pinning.close()
        self.retaining.close()

    @property
    def pin_seconds_left(self) -> float | None:
        """Seconds until the next pin or retention expires, at least 0; `None` without any."""
        deadlines = (self.pinning.pins.next_deadline, self.retaining.next_deadline)
        next_deadline = min((deadline for deadline in deadlines if deadline is not None), default=None)
        return None if next_deadline is None else max(0.0, next_deadline - self._clock.monotonic())

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache, which also invalidates peers' tickets for cached blocks; return the number of dropped
        blocks. Sequences keep their pages, and tiers their objects. All pins and retentions end."""
        self.watch.reset()
        self.pinning.clear()
        self.retaining.clear()
        return self.allocator.reset_cache()

    # ------------------------------------------------------------------ views

    def observe(self, watch: StepWatch) -> None:
        """Report requests and steps, and the phases of the runner, to `watch` from now on; `NO_WATCH` ends this."""
        self.watch = watch
        self._pipeline.observe(watch)

    @property
    def runs_ahead(self) -> bool:
        """Whether steps may be launched before the previous one's tokens are read."""
        return self._pipeline.can_run_ahead

    def load(self) -> WorkerLoad:
        """Count all resources that the engine holds; the worker adds its tickets and calls."""
        held_pages = [len(pages) for pages in self._exports.values()]
        return engine_load(
            self.scheduler, self._loads, held_pages, num_pins=len(self.pinning.pins), num_pinned=len(self._pinned),
            num_held=self.pausing.num_held,
        )  # fmt: skip

    @property
    def is_pause_settled(self) -> bool:
        """Whether generation is paused, and no step and no load is in flight."""
        return self.pausing.is_settled(num_in_flight=self._pipeline.is_ahead + self._loads.num_transfers)

    @property
    def speculation(self) -> Speculation | None:
        """Drafts of decoding sequences; `None` if speculation is off."""
        return self.scheduler.drafting.speculation

    @property
    def adapter_infos(self) -> tuple[AdapterInfo, ...]:
        """All adapters, including retired ones, sorted by name."""
        return () if self.adapters is None else self.adapters.adapters

    @property
    def masks(self) -> GrammarMasks | None:
        """Masks of constrained sequences; `None` if the model has no tokenizer."""
        return self._masks

    @property
    def is_idle(self) -> bool:
        """Whether the engine holds no sequence, export, transfer or store, and every page is free or pinned."""
        held, pool = self._exports or self._loads.num_transfers, self.allocator.pool
        is_idle = self.scheduler.is_idle and not self.pausing.num_held
        return is_idle and not held and pool.num_free + len(self._pinned) == pool.num_blocks

    def check_integrity(self) -> None:
        """Check the pool's invariants and invariant I4: a page's references are exactly those of block tables, exports,
        stores, prefetches, pins and retentions.

        Raises:
            InvariantBroken: an invariant is violated; the message has the numbers.
        """
        self.allocator.check_integrity()
        tables = (s.kv.table.pages for s in self.scheduler.sequences)
        held = [*self._exports.values(), *self._loads.stores_held, *self._loads.prefetches_held]
        held += [*self.pinning.pins.held, *self.retaining.held]
        self.allocator.pool.check_references(chain(tables, held))
        self.pinning.check_integrity()
        self.retaining.check_integrity()

    # ------------------------------------------------------------------ internals

    @property
    def _spare_pages(self) -> int:
        """Number of pages beside those of the longest request."""
        return self.allocator.pool.num_blocks - self.allocator.needs.pages_for(self.max_model_tokens)

    def _expire_pins(self) -> None:
        self.pinning.expire()
        self.retaining.expire(self._clock.monotonic())

    def _first_mask(self, request: EngineRequest, num_prompt: int) -> TokenMask | None:
        constraint = request.sampling.constraint
        if self._masks is None or constraint is None:
            return None
        return self._masks.begin(constraint, request.token_ids[num_prompt:])

    def _keep_export(self, export: Export) -> int:
        number = self.num_exports
        self.num_exports += 1
        self._exports[number] = export.blocks
        return number

    def _latest_start(self, request: EngineRequest) -> float | None:
        """Return the time after which a request that has not started is refused, since it can no longer meet its
        deadline. Only half the estimated time for its prompt is reserved, because the estimate may be too long."""
        if request.deadline is None:
            return None
        return request.deadline - 0.5 * self._prices.compute_seconds(0, len(request.token_ids))

    def _check(self, request: EngineRequest) -> None:
        if request.adapter is not None and self.adapters is None:
            raise UnknownModel("this engine does not support adapters; set adapter_slots", field="model")
        if request.adapter is not None and self.adapters is not None:
            self.adapters.check(request.adapter, self._clock.monotonic())
        if not is_scope_of(request.scope, request.adapter):
            named = "a request without an adapter"
            if request.adapter is not None:
                named = f"this version of adapter {shortened(request.adapter.name)!r}"
            raise InvalidRequest(
                f"scope must be a cache scope of {named}; the gateway sets both from the same adapter", field="scope"
            )
        count = len(request.token_ids)
        if count - request.num_generated < 1:
            raise InvalidRequest("the prompt is empty; send at least one token", field="prompt", reason="PROMPT_EMPTY")
        check_length(count, self.max_model_tokens, has_output=request.pooling is None)
        check_prompt_logprobs(request.sampling, count - request.num_generated)
        if not request.sampling.is_greedy and request.sampling.seed is None:
            # The gateway chooses the seed, so that a request samples the same tokens on every worker.
            raise InvalidRequest("seed is missing; set a seed for requests with a temperature above 0", field="seed")
        if request.sampling.constraint is not None and self._masks is None:
            raise InvalidRequest("constraints need a tokenizer, but this engine's model has none", field="constraint")
        if min(request.token_ids) < 0 or max(request.token_ids) >= self._model.vocab_size:
            raise InvalidRequest(
                f"token ids must be from 0 to {self._model.vocab_size - 1}, not {min(request.token_ids)} to "
                f"{max(request.token_ids)}",
                field="token_ids",
            )

    def _next_plan(self) -> StepPlan:
        """Plan the next step; a paused engine has none."""
        return self.scheduler.schedule() if self.pausing.plans_steps else StepPlan(())

    def _run(self, plan: StepPlan) -> list[SequenceUpdate]:
        begun = self._clock.monotonic()
        self.watch.phase(COMPUTE)
        try:
            follows = self.pausing.plans_steps
            result = self._pipeline.run(plan, lambda: self.scheduler.follow(plan) if follows else None)
        except BaseException:
            self.failed_step = frozenset(self._pipeline.in_flight(plan))
            raise
        self.watch.phase(RECORD)
        chunks = [item for item in plan.scheduled if not item.is_decode]
        if len(chunks) == 1:  # the step may also have decode rows, which is usual under load
            seconds = self._clock.monotonic() - begun
            self._prices.observe_compute(chunks[0].num_computed, chunks[0].num_scheduled, seconds)
        self.scheduler.drafting.read(plan, result, self.scheduler.has_sequence)
        updates = self.scheduler.update(plan, result)
        ended = self._clock.monotonic()
        self.scheduler.drafting.observe(plan, ended - begun)
        self.statistics.record(plan, updates, ended)
        return updates


def _loads_nothing(_adapter: AdapterId, _folder: Path) -> None:
    """Load no adapter, in an engine without adapters."""
