"""A worker in virtual time: the production scheduler, block pool, prefix index and KV loads, and a device profile.

    inbox --> scheduler.schedule --> device: seconds of the planned work --> scheduler.update --> listener

As in `engine.Engine.step`, everything that arrives during a step is processed before the next step is planned.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import BlockId, RequestId
from kvferry.core.load import WorkerLoad
from kvferry.core.retention import RetentionOutcome
from kvferry.core.sampling import SamplingParams
from kvferry.engine.observe.engine_load import engine_load
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.blocks.block_pool import BlockPool
from kvferry.engine.schedule.blocks.prefix_index import CacheChange, PrefixIndex
from kvferry.engine.schedule.loads.kv_loads import KvLoads
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.pins.pins import PageUses
from kvferry.engine.schedule.pins.retaining import Retaining
from kvferry.engine.schedule.plan.scheduler import Scheduler
from kvferry.engine.schedule.speculation.speculation import Speculation
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate
from kvferry.engine.schedule.step.sequence import Sequence as EngineSequence
from kvferry.engine.schedule.step.sequence import SequenceState
from kvferry.engine.schedule.step.sequence_request import SequenceRequest
from kvferry.engine.schedule.step.step import SequenceOutput, StepPlan, StepResult
from kvferry.kv.interface.connector import KvLoader, LoadOutcome
from kvferry.kv.interface.tiering import KvMessage
from kvferry.kv.pricing.price import PriceBook
from kvferry.simulator.clock import VirtualClock
from kvferry.simulator.worker.cores import SharedCores
from kvferry.simulator.worker.decode_runs import DecodeRun, KnownDrafts, num_steps, plan_run
from kvferry.simulator.worker.device import DeviceProfile, work_of
from kvferry.simulator.worker.jobs import Job, Listener, ReplicaCounts, ReplicaSettings

SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True)
_NO_EOS: frozenset[int] = frozenset()

Observer = Callable[["SimulatedReplica", StepPlan, float], None]
"""Called with the plan and the duration in seconds of each step, before the step is recorded."""


MakeScheduler = Callable[[ReplicaSettings, Speculation | None], Scheduler]
"""Creates a replica's scheduler, with its allocator."""


def make_production_scheduler(settings: ReplicaSettings, speculation: Speculation | None) -> Scheduler:
    """Create a scheduler as an engine does."""
    index = PrefixIndex()
    pool = BlockPool(settings.num_blocks, on_reuse=index.forget)
    return Scheduler(settings.limits, Allocator(pool, index, block_tokens=settings.block_tokens), speculation)


class SimulatedReplica:
    """One simulated worker."""

    def __init__(
        self,
        clock: VirtualClock,
        settings: ReplicaSettings,
        profile: DeviceProfile,
        listener: Listener,
        namer: Callable[[str], BlockNamer],
        *,
        loader: KvLoader | None = None,
        on_changes: Callable[[list[CacheChange]], None] | None = None,
        observer: Observer | None = None,
        make_scheduler: MakeScheduler | None = None,
        cores: SharedCores | None = None,
        jitter: Callable[[], float] | None = None,
    ) -> None:
        """
        Args:
            clock: the virtual clock.
            settings: limits and sizes of the engine.
            profile: gives the duration of a step.
            listener: receives the events of jobs.
            namer: returns the block namer of a tenant.
            loader: fetches KV from other replicas.
            on_changes: called with the changes of the prefix index after each step.
            observer: receives the steps; `None` for none.
            make_scheduler: creates the scheduler and its allocator, for baselines; by default, the production classes.
            cores: processor cores shared with other replicas; by default, the replica has its own device.
            jitter: returns a factor for each step's duration; default: 1.
        """
        self._clock, self.settings, self._profile = clock, settings, profile
        self._listener, self._namer, self._on_changes, self._observer = listener, namer, on_changes, observer
        self._cores, self._jitter = cores, jitter
        # With shared cores, a step's duration depends on other replicas, so decode steps cannot be batched into one
        # run.
        has_runs = settings.takes_runs and observer is None and cores is None and jitter is None
        self._drafts = KnownDrafts() if has_runs else None
        self.scheduler = (make_scheduler or make_production_scheduler)(settings, self._drafts)
        self.allocator = self.scheduler.allocator
        self._prices = PriceBook(settings.load_policy)
        self._loads = KvLoads(
            self.scheduler, self.allocator, loader=loader, tiers=None, prices=self._prices,
            block_bytes=settings.block_bytes,
        )  # fmt: skip
        self._retained = PageUses()
        self.retaining = Retaining(
            self.allocator, share=settings.retention_share, room=self._spare_pages, clock=clock, namer=namer,
            all_uses=self._retained,
        )  # fmt: skip
        """Prompts whose blocks are kept because their requests asked for it."""
        self._most_tokens = 0
        self.counts = ReplicaCounts()
        self._jobs: dict[RequestId, Job] = {}
        self._inbox: deque[Job] = deque()
        self._is_busy = self._is_waking = self._is_stopped = False
        self._run: DecodeRun | None = None
        self._run_number = 0

    # ------------------------------------------------------------------ input

    def submit(self, job: Job) -> None:
        """Accept a job."""
        self._jobs[job.request_id] = job
        self._inbox.append(job)
        self.wake()

    def post(self, message: KvMessage) -> None:
        """Accept a message of a loader."""
        self._loads.post(message)
        if isinstance(message, LoadOutcome) and message.failure is None and message.request_id in self._jobs:
            self._listener.fetched(self._jobs[message.request_id], message.num_blocks, message.seconds)
        self.wake()

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Free the pages of an offer."""
        self.allocator.pool.release(blocks)
        self.wake()

    def wake(self) -> None:
        """Plan a step, if none is running, after all events at the present time; a run of decode steps ends with the
        step that is running."""
        if not self._is_busy:
            if not self._is_waking:
                self._is_waking = True
                self._clock.at(self._clock.now, self._wake)
        elif self._run is not None and self._run.cut(self._clock.now):
            self._end_run_at(self._run)

    def stop(self) -> list[Job]:
        """Stop permanently, as after a crash; return the jobs that are lost."""
        self._record_ended()
        self._run = None
        self._is_stopped = True
        lost = list(self._jobs.values())
        self._jobs.clear()
        return lost

    def catch_up(self) -> None:
        """Record the steps of a run that have ended, and plan the step that is running, so that `load` is the same as
        if steps were simulated one by one."""
        run = self._run
        if run is None or run.end <= self._clock.now:
            return
        end = next(end for end in run.ends if end > self._clock.now)
        begun = self._record_ended()
        self._run = None
        plan = self.scheduler.schedule()
        seconds = end - begun
        self._clock.at(end, partial(self._end, plan, seconds))

    # ------------------------------------------------------------------ views

    @property
    def is_stopped(self) -> bool:
        """Whether the replica has stopped."""
        return self._is_stopped

    @property
    def num_jobs(self) -> int:
        """Number of jobs that have not ended."""
        return len(self._jobs)

    @property
    def load(self) -> WorkerLoad:
        """The load that the replica reports."""
        load = engine_load(self.scheduler, self._loads, (), num_pinned=len(self._retained))
        waiting = [len(job.tokens) for job in self._inbox]
        return replace(
            load, waiting=load.waiting + len(waiting), tokens_to_compute=load.tokens_to_compute + sum(waiting)
        )

    @property
    def kv_usage(self) -> float:
        """Fraction of the pages in use, 0 to 1."""
        pool = self.allocator.pool
        return 1.0 - pool.num_free / pool.num_blocks

    @property
    def hits(self) -> tuple[int, int]:
        """Number of prompt tokens found in the prefix cache, and number looked up."""
        return self.scheduler.admission.num_hit_tokens, self.scheduler.admission.num_queried_tokens

    # ------------------------------------------------------------------ the step

    def _wake(self) -> None:
        self._is_waking = False
        if not self._is_busy:
            self._begin()

    def _begin(self) -> None:
        if self._is_stopped:
            return
        self._loads.take_in()
        while self._inbox:
            self._add(self._inbox.popleft())
        self.retaining.expire(self._clock.now)
        scheduler = self.scheduler
        if not (scheduler.num_running or scheduler.num_waiting):
            return
        if self._drafts is not None:
            running = [s for s in scheduler.sequences if s.state is SequenceState.RUNNING]
            # First tokens are reported when they are sampled, but the tokens of a `DecodeRun` only at its end, so
            # single steps run until every sequence has its first token.
            has_begun = all(self._jobs[s.request_id].first is not None for s in running)
            steps = num_steps(scheduler, running) if has_begun else 1
            if steps > 1:
                kv_tokens = sum(s.kv.num_computed for s in running) + len(running)
                self._is_busy = True
                self._run = DecodeRun(self._clock.now, len(running), kv_tokens, steps, self._profile)
                self._end_run_at(self._run)
                return
        plan = scheduler.schedule()
        self._loads.start_planned()
        for request_id in scheduler.take_started():
            self._jobs[request_id].started = self._clock.now
        if not plan.scheduled:
            deadline = self.retaining.next_deadline
            if deadline is not None:  # a sequence may wait for the pages of a retention
                self._clock.at(deadline, self.wake)
            return
        seconds = self._profile.seconds(work_of(plan.scheduled))
        if self._jitter is not None:
            seconds *= self._jitter()
        self._is_busy = True
        if self._cores is None:
            self._clock.after(seconds, partial(self._end, plan, seconds))
        else:
            self._cores.run(seconds, partial(self._end, plan))

    def _add(self, job: Job) -> None:
        request = SequenceRequest(
            job.request_id,
            job.num_prompt,
            SAMPLING,
            self._namer(job.tenant),
            max_tokens_total=job.num_prompt + job.output.count,
            eos_token_ids=_NO_EOS,
            scope=job.tenant,
            priority=job.priority,
            exports=job.exports,
        )
        remote = job.remote if self._loads.can_fetch else None
        sequence = EngineSequence(request, list(job.tokens), names=list(job.names), remote=remote)
        job.sequence = sequence
        self.scheduler.add(sequence)
        self._loads.arrive(sequence)
        self._most_tokens = max(self._most_tokens, request.max_tokens_total)
        if job.retain_seconds:
            self.retaining.add(
                EngineRequest(
                    job.request_id,
                    list(job.tokens),
                    SAMPLING,
                    num_generated=len(job.tokens) - job.num_prompt,
                    scope=job.tenant,
                    retain_seconds=job.retain_seconds,
                )
            )
        if job.remote is not None and sequence.kv.remote is None:
            self._listener.declined(job)

    def _end(self, plan: StepPlan, seconds: float) -> None:
        self._is_busy = False
        if self._is_stopped:
            return
        if self._observer is not None:
            self._observer(self, plan, seconds)
        self._count(plan, seconds, 1)
        chunks = [item for item in plan.scheduled if not item.is_decode]
        if len(chunks) == 1:
            self._prices.observe_compute(chunks[0].num_computed, chunks[0].num_scheduled, seconds)
        outputs: dict[RequestId, SequenceOutput] = {}
        for item in plan.scheduled:
            if item.num_sampled:
                job = self._jobs[item.request_id]
                outputs[item.request_id] = SequenceOutput(
                    job.output.sampled(len(item.token_ids) - item.num_prompt, 1), item.num_scheduled
                )
        now = self._clock.now
        updates = self.scheduler.update(plan, StepResult(outputs))
        for result in self.retaining.stepped(updates).values():
            is_kept = result.outcome is RetentionOutcome.RETAINED
            self.counts.retained += is_kept
            self.counts.unretained += not is_kept
        for update in updates:
            self._token(update, now)
        self._flush()
        self._begin()

    def _end_run_at(self, run: DecodeRun) -> None:
        self._run_number += 1
        self._clock.at(run.end, partial(self._end_run, self._run_number))

    def _end_run(self, number: int) -> None:
        run = self._run
        if number != self._run_number or run is None or self._drafts is None:
            return  # the run was cut after this event was created
        self._is_busy, self._run = False, None
        if self._is_stopped:
            return
        self._record_run(run)
        self._begin()

    def _record_ended(self) -> float:
        """Record the steps of the run that have ended; return the start time of the next step."""
        run = self._run
        if run is None:
            return self._clock.now
        ended = [end for end in run.ends if end <= self._clock.now]
        if not ended:
            return run.start
        run.ends = ended
        self._record_run(run)
        return ended[-1]

    def _record_run(self, run: DecodeRun) -> None:
        assert self._drafts is not None
        steps = len(run.ends)
        plan = plan_run(self.scheduler, self._drafts, steps)
        self._count(plan, run.end - run.start, steps)
        outputs = {
            item.request_id: SequenceOutput(
                self._jobs[item.request_id].output.sampled(
                    len(item.token_ids) - item.num_drafts - item.num_prompt, steps
                ),
                steps,
            )
            for item in plan.scheduled
        }
        gaps = run.gaps()
        for gap in gaps:
            self._listener.gap(gap, len(plan.scheduled))
        for update in self.scheduler.update(plan, StepResult(outputs)):
            self._token(update, run.ends[0], run.end, gaps)
        self._flush()

    def _token(self, update: SequenceUpdate, now: float, last: float | None = None, gaps: Sequence[float] = ()) -> None:
        """Pass the tokens of an update to the listener: the first at `now`, the last at `last`."""
        job = self._jobs[update.request_id]
        if job.last is None:
            self._listener.first_token(job, now)
        else:
            self._listener.gap(now - job.last, 1)
            if job.gaps is not None:
                job.gaps.append(now - job.last)
        if job.gaps is not None and gaps:
            job.gaps.extend(gaps)
        if job.first is None:
            job.first = now
            self._listener.answered(job, now)
        job.last = now if last is None else last
        if update.finish_reason is not None:
            del self._jobs[job.request_id]
            self._listener.finished(job, job.last)
        elif update.export is not None:
            del self._jobs[job.request_id]
            self._listener.exported(job, update.export, job.last)

    def _count(self, plan: StepPlan, seconds: float, steps: int) -> None:
        counts, pool = self.counts, self.allocator.pool
        counts.steps += steps
        counts.tokens += plan.num_tokens
        counts.sampled += sum(item.num_sampled for item in plan.scheduled)
        counts.busy_seconds += seconds
        counts.page_seconds += seconds * (pool.num_blocks - pool.num_free)
        counts.sequence_seconds += seconds * len(plan.scheduled)

    def _spare_pages(self) -> int:
        """Return the number of pages beside those of the longest request so far."""
        return self.allocator.pool.num_blocks - self.allocator.needs.pages_for(self._most_tokens)

    def _flush(self) -> None:
        self.scheduler.blocks.take_progress()
        self._loads.take_decisions()
        changes = self.allocator.index.take_changes()
        if changes and self._on_changes is not None:
            self._on_changes(changes)
