"""Scheduler with continuous batching, chunked prefill and preemption: plans the next step over a token budget. Pure.

One step, in order:

1. *Running* sequences, in the order of the policy (`engine.schedule.policies`; by default the oldest first), each get
   min(N - C, chunk limit, remaining budget) tokens; if any of them decodes, all prompts together get at most
   `max_mixed_tokens`, which bounds the inter-token latency. If pages run short, the last running sequence in that order
   is preempted: its pages are freed, C is reset to 0, its tokens are kept, and it waits in the queue to be recomputed,
   or loaded if a tier has its KV (Kwon et al., PagedAttention, section 4.5).
2. *Waiting* sequences, in the order of the policy, start from their longest cached prefix (C = hit, at most N - 1)
   until the budget, the sequence limit or the pages are exhausted; admission stops at the first sequence that does not
   fit, so that none starves. Pages that admitted prompts still need, and a small reserve, are left to running sequences
   (`admission`). A sequence whose KV is at a peer or in a tier gets its pages and a `LoadJob`; it runs when its KV is
   loaded. A sequence whose tier lookup is pending is skipped, and one whose adapter has no free slot is passed over
   (`admission`).

Sequences of the lowest priority pause while others are computed (`policies.background`).

Prefill and decode are not separate phases; both are given by N - C (see `sequence`). `schedule` changes tables and
queues; `update` must be called with its result before the next `schedule`.
"""

import itertools
from collections.abc import Callable, Collection
from collections.abc import Sequence as OrderedView

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import InvariantBroken, KvferryError
from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import RequestId
from kvferry.core.sampling import FinishReason, SampledToken, ScoredToken
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.plan.admission import Admission, num_lacking
from kvferry.engine.schedule.plan.admitted import AdmittedSequences
from kvferry.engine.schedule.plan.full_blocks import FullBlocks
from kvferry.engine.schedule.plan.lookahead import MAX_AHEAD, is_same, one_ahead, share
from kvferry.engine.schedule.plan.prompt_accounts import PromptAccounts
from kvferry.engine.schedule.plan.step_budget import StepBudget
from kvferry.engine.schedule.policies.background import BackgroundTurns, is_background
from kvferry.engine.schedule.policies.deadlines import Deadlines, is_overdue, overdue
from kvferry.engine.schedule.policies.policy import policy_of
from kvferry.engine.schedule.speculation.drafting import Drafting
from kvferry.engine.schedule.speculation.speculation import Speculation
from kvferry.engine.schedule.step.adapter_slots import AdapterSlots
from kvferry.engine.schedule.step.kv_jobs import Export, LoadJob, SequenceUpdate
from kvferry.engine.schedule.step.kv_progress import RemoteKv
from kvferry.engine.schedule.step.prompt_pooling import PromptPooling
from kvferry.engine.schedule.step.sequence import Sequence, SequenceEvent, SequenceState
from kvferry.engine.schedule.step.step import ScheduledSequence, SequenceOutput, StepPlan, StepResult, check_output

Planned = list[ScheduledSequence]


class Scheduler:
    """Scheduler of one engine; owns every sequence from `add` to its end. Not thread-safe."""

    def __init__(
        self, limits: SchedulerLimits, allocator: Allocator, speculation: Speculation | None = None,
        slots: AdapterSlots | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            limits: limits in tokens, sequences and pages, and the name of the scheduling policy.
            allocator: allocates the engine's pages, with the prefix cache.
            speculation: proposes draft tokens; `None` for one token per sequence and step.
            slots: adapter slots; `None` for an engine without adapters.
        """
        self.limits = limits
        self.allocator = allocator
        self.slots = slots or AdapterSlots(0)
        self.blocks = FullBlocks(allocator)
        """Processing of full blocks: prefix index, stores and reports."""
        self.drafting = Drafting(speculation, allocator)
        """Draft tokens of the running sequences."""
        self._policy = policy_of(limits.scheduling)
        self._background = BackgroundTurns(self._policy.background_period(limits))
        self._deadlines = Deadlines()
        self.accounts = PromptAccounts(allocator)
        """Sources of the prompts' tokens, and the causes of the computed ones."""
        self._admitted = AdmittedSequences(self._policy.order, self.accounts)
        self._known: dict[RequestId, Sequence] = {}
        self.admission = Admission(limits, allocator, self._policy, admitted=self._admitted, slots=self.slots)
        """Admission of waiting sequences, with their queue and its statistics."""
        self._preempted: list[Sequence] = []
        self._arrivals = itertools.count()
        self._may_admit = False
        self._num_ahead = 0
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence.

        Raises:
            InvariantBroken: the request id is in use, or the sequence can never fit; callers check both.
        """
        if sequence.request_id in self._known:
            raise InvariantBroken(f"request {sequence.request_id} was added twice")
        if self.allocator.needs.pages_for(sequence.request.max_tokens_total) > self.allocator.pool.num_blocks:
            raise InvariantBroken(f"request {sequence.request_id} needs more pages than the pool has")
        sequence.name_blocks()  # here, and not in the step that admits it, because that step may admit many
        sequence.arrive(next(self._arrivals))
        self._known[sequence.request_id] = sequence
        self._may_admit = True
        self.admission.wait(sequence)
        self._deadlines.add(sequence)

    def abort(self, request_id: RequestId) -> bool:
        """Abort a sequence and free its pages; return whether it existed. Idempotent."""
        sequence = self._known.pop(request_id, None)
        if sequence is None:
            return False
        if sequence.state is SequenceState.WAITING:
            self.admission.withdraw(sequence, SequenceEvent.ABORT)
        else:
            self._admitted.remove(sequence, SequenceEvent.ABORT)
        self._may_admit = True
        self.drafting.forget(request_id)
        self.allocator.free(sequence.kv.table)
        self.admission.give_back_slot(sequence)
        return True

    # ------------------------------------------------------------------ the step

    def schedule(self) -> StepPlan:
        """Plan the next step; the plan is empty if no sequence can run now."""
        self._may_admit, self._num_ahead = False, 0
        self._displace()
        active = self._background.begin(
            self._admitted.running,
            num_waiting=self.admission.num_waiting,
            num_waiting_background=self.admission.num_waiting_background,
        )
        planned = self._plan(active)
        if not planned and self._background.may_resume:  # the sequence that waits cannot start yet
            self._background.resume()
            planned = self._plan(self._admitted.running)
        planned.sort(key=lambda item: item.adapter_slot)  # kernels read an adapter's weights once for adjacent rows
        return StepPlan(tuple(planned))

    def _plan(self, running: OrderedView[Sequence]) -> Planned:
        """Plan a step of running sequences and of those that are admitted."""
        num_waiting, foreground = self.admission.num_waiting, self._background.is_paused
        room = StepBudget(self.limits, running, num_waiting, self._background.max_tokens)
        planned: Planned = []
        preempted_before = self.num_preemptions
        may_precede = num_waiting > 0 and self._policy.mixes
        drafts = self.drafting.plan(running, may_admit=num_waiting > 0 and self.admission.has_slot)
        for sequence in self._policy.by_turn(running):
            if room.tokens == 0:
                break
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted earlier in this loop
            kv, sampling = sequence.kv, sequence.sampling
            num_due = len(sampling.tokens) - kv.num_computed
            if may_precede and num_due > 1 and self.num_preemptions == preempted_before:
                self.admission.admit(room, planned, before=sequence, foreground=foreground)
            if sampling.is_postponed and sampling.waits_for_mask:
                continue
            in_background = is_background(sequence)
            count = room.fit(num_due, in_background=in_background)
            if num_due > 1:
                count = room.fit_scored(sampling, kv.num_computed, count)
            if count == 0:
                continue  # no budget for this prompt; decoding sequences still fit
            draft = drafts.get(sequence.request_id, ())[: room.fit_drafts(count, in_background=in_background)]
            if not self.drafting.grow(sequence, draft, len(running)):
                draft = ()
                if not self._grow_or_preempt(sequence, count, planned):
                    continue
            planned.append(share(sequence, count, draft, *self.drafting.verification(sequence, draft)))
            item = planned[-1]
            room.take(num_due, item.num_scheduled, item.num_scored, in_background=in_background)
        if self.num_preemptions == preempted_before:  # otherwise pages are scarce
            self.admission.admit(room, planned, foreground=foreground)
        return planned

    def follow(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after a launched one that was not passed to `update`; `None` if `update` must be called first.

        If the caller launches the plan, it must be the next plan passed to `update`, before any `schedule`. While
        sequences wait that the last `schedule` could not admit, at most `MAX_AHEAD` steps are planned in this way.
        """
        running = self._admitted.running
        if sum(map(self.has_sequence, plan.scheduled)) != len(running) - self._background.num_paused:
            return None
        if self._background.is_last_planned:
            return None
        if self.admission.num_waiting and (self._may_admit or self._num_ahead >= MAX_AHEAD):
            return None
        if self.drafting.has_drafts(running):
            return None
        self._num_ahead += 1
        self._background.ahead()
        return one_ahead(plan, self._known, self.allocator)

    def take_overdue(self, now: float) -> list[SequenceUpdate]:
        """End the sequences that at `now`, monotonic seconds, have waited too long and have computed nothing."""
        updates: list[SequenceUpdate] = []
        for request_id, arrival in self._deadlines.take_overdue(now):
            sequence = self._known.get(request_id)
            if sequence is not None and sequence.arrival == arrival and is_overdue(sequence):
                self.abort(request_id)
                updates.append(SequenceUpdate(request_id, (), None, 0, error=overdue(request_id)))
        return updates

    def restart(self, namer: Callable[[str], BlockNamer]) -> list[Sequence]:
        """Preempt all running sequences and rename the blocks of all sequences, because the model's weights changed;
        no sequence is loading. Return all sequences, which wait.

        Args:
            namer: returns the new namer of a scope.
        """
        for sequence in reversed(list(self._admitted.running)):
            self._preempt(sequence)
        self._preempted.clear()
        self._may_admit = True
        for sequence in self._known.values():
            sequence.rename(namer(sequence.request.scope))
        return list(self._known.values())

    def has_sequence(self, item: ScheduledSequence) -> bool:
        """Return whether the sequence of a scheduled item still exists."""
        sequence = self._known.get(item.request_id)
        return sequence is not None and is_same(sequence, item)

    def is_waiting(self, request_id: RequestId) -> bool:
        """Return whether a sequence is waiting for admission and holds no pages."""
        sequence = self._known.get(request_id)
        return sequence is not None and sequence.state is SequenceState.WAITING

    def take_loads(self) -> list[LoadJob]:
        """Return the loads planned by `schedule` since the last call."""
        return self._admitted.take_jobs()

    def take_preempted(self) -> list[Sequence]:
        """Return the waiting sequences that were preempted since the last call, for tier lookups. Their admission does
        not wait for the lookup (`answered`)."""
        preempted, self._preempted = self._preempted, []
        return [s for s in preempted if s.state is SequenceState.WAITING and s.sampling.may_load]

    def take_started(self) -> list[RequestId]:
        """Return the requests that were admitted or loaded since the last call; the next step is their first."""
        return self.admission.take_started()

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Record the results of a step. Sequences that ended after its launch are skipped; failed sequences end now.

        Raises:
            InvariantBroken: tokens are missing, belong to a sequence without sampled rows, or do not match the number
                of accepted tokens.
        """
        updates: list[SequenceUpdate] = []
        for item in plan.scheduled:
            sequence = self._known.get(item.request_id)
            if sequence is None or not is_same(sequence, item):
                continue
            error = result.failures.get(item.request_id)
            if error is not None:
                updates.append(self._fail(sequence, error))
                continue
            kv, sampling = sequence.kv, sequence.sampling
            if item.num_scored:
                sampling.add_scores(result.scores.get(item.request_id, ()), item.num_scored)
            if sampling.pooling is not None and item.pooled_positions:
                sampling.pooling.add(result.pooled.get(item.request_id), item.pooled_positions)
            output = result.outputs.get(item.request_id)
            if item.request_id in result.postponed:
                sampling.postpone()  # the next step computes and samples the first sampled row again
                self._advance(sequence, item.num_scheduled - item.num_sampled)
                self.blocks.list_full(sequence)
                continue
            if sampling.is_postponed:
                sampling.resume()
            if output is None and not item.num_sampled:
                self._advance(sequence, item.num_scheduled)
                self.blocks.list_full(sequence)
                if sampling.pooling is not None and kv.num_computed == len(sampling.tokens):
                    updates.append(self._pooled(sequence, sampling.pooling))
            else:
                updates.append(self._append(sequence, item, output))
        return updates

    # ------------------------------------------------------------------ loads

    def answered(self, request_id: RequestId, remote: RemoteKv | None) -> bool:
        """Record the result of a tier lookup; return whether the sequence is still waiting."""
        if not self.is_waiting(request_id):
            return False
        sequence = self._known[request_id]
        sequence.kv.end_lookup(remote)
        return True

    def loaded(self, request_id: RequestId, num_tokens: int, *, is_stored: bool = False) -> bool:
        """Record that KV is loaded and verified up to `num_tokens`; return whether the sequence is still waiting. If
        `is_stored`, the KV came from a tier and need not be stored."""
        sequence = self._admitted.take_loaded(request_id)
        if sequence is None:
            return False
        self.accounts.loaded(sequence, num_tokens, is_tier=is_stored)
        sequence.kv.loaded_to(num_tokens, num_stored=num_tokens // self.allocator.block_tokens if is_stored else 0)
        self.blocks.list_loaded(sequence)
        self.admission.start(sequence)
        return True

    def load_failed(self, request_id: RequestId) -> Sequence | None:
        """Move the sequence of a failed load back to the queue and free its pages; those that a transport may still
        write to are quarantined. Return the sequence, or `None` if it has ended."""
        sequence = self._admitted.take_loaded(request_id)
        if sequence is None:
            return None
        self.allocator.free(sequence.kv.table)
        sequence.kv.drop_remote(unloaded_from=sequence.kv.num_computed)
        sequence.kv.lost_pages()
        sequence.move(SequenceEvent.LOAD_FAILED)
        self.admission.give_back_slot(sequence)
        self.admission.wait(sequence)
        return sequence

    def load_decided(self, request_id: RequestId, *, dearer: range) -> None:
        """Record the positions of a sequence that could be loaded, and are computed because that is faster."""
        sequence = self._known.get(request_id)
        if sequence is not None:
            sequence.kv.account.load_dearer(dearer)

    # ------------------------------------------------------------------ views

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for admission."""
        return self.admission.num_waiting

    @property
    def num_tokens_to_compute(self) -> int:
        """Number of tokens whose KV is not computed, of waiting sequences and of prompts in progress."""
        under_way = sum(max(0, s.request.num_prompt - s.kv.num_computed) for s in self._admitted.running)
        return self.admission.num_waiting_tokens + under_way

    @property
    def num_running(self) -> int:
        """Number of sequences that take part in steps."""
        return len(self._admitted.running)

    @property
    def num_loading(self) -> int:
        """Number of sequences whose KV is being loaded."""
        return self._admitted.num_loading

    @property
    def is_idle(self) -> bool:
        """Whether the scheduler has no sequence; exports may still hold pages."""
        return not self._known

    @property
    def num_promised(self) -> int:
        """Number of free pages that are reserved for the current tokens of admitted sequences."""
        return num_lacking(self.allocator, self._admitted)

    @property
    def sequences(self) -> Collection[Sequence]:
        """All sequences."""
        return self._known.values()

    # ------------------------------------------------------------------ internals

    def _displace(self) -> None:
        """Preempt sequences of lower classes until the first waiting sequence fits, if the policy permits it."""
        running = self._admitted.running
        may_displace = self._policy.displaces or (bool(running) and is_background(running[-1]))
        first = self.admission.first_waiting if may_displace else None
        while first is not None and running and self._policy.displaced(first, running[-1]):
            if self.admission.has_room_for(first):
                return
            self._preempt(running[-1])

    def _grow_or_preempt(self, sequence: Sequence, count: int, planned: Planned) -> bool:
        """Allocate pages for `count` tokens, preempting sequences while pages are short; `False` if the sequence itself
        was preempted."""
        while not self.allocator.grow(sequence.kv.table, num_tokens=sequence.kv.num_computed + count):
            victim = self._policy.victim(self._admitted.running, planned)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self._admitted.remove(victim, SequenceEvent.PREEMPT)
        self.allocator.free(victim.kv.table)
        victim.kv.lost_pages()
        self.admission.give_back_slot(victim)
        self._preempted.append(victim)
        self.admission.wait(victim)
        self.num_preemptions += 1

    def _advance(self, sequence: Sequence, count: int) -> None:
        kv = sequence.kv
        if kv.num_computed < kv.account.num_given:
            self.accounts.computed(sequence, count)
        kv.advance(count)

    def _append(self, sequence: Sequence, item: ScheduledSequence, given: SequenceOutput | None) -> SequenceUpdate:
        kv, sampling, exports = sequence.kv, sequence.sampling, sequence.request.exports
        exported_tokens = len(sampling.tokens)
        output = check_output(item, given, kv.num_computed, exported_tokens)
        self.drafting.verified(item, output)
        drawn, accepted = output.tokens, output.accepted
        self._advance(sequence, accepted)
        self.blocks.list_full(sequence)
        scores = sampling.take_scores()
        drawn, reason = sampling.extend(drawn)
        if sampling.mask is not None and reason is None and not exports:
            sampling.advance_mask(drawn)
        if accepted > item.num_scheduled - item.num_sampled + 1:  # several rows: accepted draft tokens can now be named
            kv.advance_to(sequence.num_tokens - 1)  # fewer than accepted if the sequence ended earlier
            self.blocks.list_full(sequence)
        if reason is None and not exports:
            return _update(sequence, drawn, None, scores=scores)
        self._finish(sequence)
        if reason is None:  # the sequence continues on another worker: its pages go to the export and are not freed
            export = self.blocks.export(sequence, exported_tokens)
            return _update(sequence, drawn, None, export=export, scores=scores)
        kept = self.blocks.export_full(sequence) if sequence.request.keeps else None
        self.allocator.free(kv.table)
        return _update(sequence, drawn, reason, kept=kept, scores=scores)

    def _pooled(self, sequence: Sequence, pooling: PromptPooling) -> SequenceUpdate:
        self._finish(sequence)
        self.allocator.free(sequence.kv.table)
        return _update(sequence, (), FinishReason.STOP, embedding=pooling.vector())

    def _finish(self, sequence: Sequence) -> None:
        self._admitted.remove(sequence, SequenceEvent.FINISH)
        del self._known[sequence.request_id]
        self._may_admit = True
        self.drafting.forget(sequence.request_id)
        self.admission.give_back_slot(sequence)

    def _fail(self, sequence: Sequence, error: KvferryError) -> SequenceUpdate:
        """End a failed sequence and remove its blocks from the prefix cache, since one of them may be damaged."""
        self.blocks.forget(sequence)
        account = sequence.kv.account
        self.abort(sequence.request_id)
        return SequenceUpdate(
            sequence.request_id, (), None, account.num_cached, error=error, computed=account.take_computed()
        )


def _update(
    sequence: Sequence,
    tokens: tuple[SampledToken, ...],
    reason: FinishReason | None,
    *,
    export: Export | None = None,
    kept: Export | None = None,
    scores: tuple[ScoredToken, ...] | None = None,
    embedding: npt.NDArray[np.float32] | None = None,
) -> SequenceUpdate:
    """Return a sequence's update, with the sources of its prompt's KV."""
    kv, account, name = sequence.kv, sequence.kv.account, sequence.request_id
    return SequenceUpdate(
        name, tokens, reason, account.num_cached, export, kept, None, scores, embedding, account.num_loaded,
        kv.num_written, account.take_computed() if account.unreported else (),
    )  # fmt: skip
