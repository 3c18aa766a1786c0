"""Replays a step log: the production scheduler and pipeline process the logged events between the logged steps.

The result is the first step that is planned differently, if any, and each step's estimated duration by a device profile
beside the measured one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.core.errors import UsageError
from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import BlockId, RequestId
from kvferry.core.sampling import SampledToken, SamplingParams
from kvferry.engine.observe.log_file import END_TOKEN, replayed
from kvferry.engine.observe.step_log import ABORT, ADD, RELEASE, LoggedRequest, LoggedStep, Planned, StepLog, planned
from kvferry.engine.schedule.loads.kv_loads import KvLoads
from kvferry.engine.schedule.plan.pipeline import Launched, Pipeline
from kvferry.engine.schedule.step.sequence import Sequence
from kvferry.engine.schedule.step.sequence_request import SequenceRequest
from kvferry.engine.schedule.step.step import SequenceOutput, StepPlan, StepResult
from kvferry.kv.pricing.price import LoadPolicy, PriceBook
from kvferry.simulator.worker.device import StepWork, work_of
from kvferry.simulator.worker.jobs import ReplicaSettings
from kvferry.simulator.worker.replica import make_production_scheduler

_SAMPLING = SamplingParams(temperature=0.0)
_ENDS = frozenset({END_TOKEN})


@dataclass(frozen=True, slots=True)
class Difference:
    """A step that was planned differently."""

    step: int
    logged: list[Planned]
    planned: list[Planned]


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay."""

    num_steps: int
    """Number of steps that were compared, including steps without a plan."""
    difference: Difference | None
    work: list[tuple[StepWork, float]]
    """Work of each step with a plan, and its measured duration in seconds."""


class StepReplay:
    """A replay of one log."""

    def __init__(self, log: StepLog) -> None:
        """
        Raises:
            UsageError: the log cannot be replayed.
        """
        if log.obstacle:
            raise UsageError(f"the step log cannot be replayed: {log.obstacle}", field="log")
        self._log = log
        facts = log.engine
        settings = ReplicaSettings(facts.num_blocks, facts.block_tokens, limits=facts.limits)
        self.scheduler = make_production_scheduler(settings, None)
        self._allocator = self.scheduler.allocator
        self._loads = KvLoads(
            self.scheduler, self._allocator, loader=None, tiers=None, prices=PriceBook(LoadPolicy.ALWAYS), block_bytes=1
        )
        self._runner = _LoggedRunner()
        self._pipeline = Pipeline(self._runner, self._allocator, runs_ahead=facts.runs_ahead)
        self._namers = BlockNamers(b"replay")
        self._exports: dict[int, tuple[BlockId, ...]] = {}
        self._num_exports = 0

    def run(self, *, observe: Callable[[StepPlan], None] = lambda _: None) -> Replayed:
        """Replay the log up to its end, or to the first difference.

        Args:
            observe: called with the plan of each step before its results are recorded.

        Raises:
            UsageError: the log is inconsistent.
        """
        work: list[tuple[StepWork, float]] = []
        for number, step in enumerate(self._log.steps):
            with replayed(number):
                for kind, which in step.events:
                    self._apply(kind, which)
                plan = self._plan()
            found = planned(plan)
            if found != step.plan:
                return Replayed(number, Difference(number, step.plan, found), work)
            observe(plan)
            if plan.scheduled:
                work.append((work_of(plan.scheduled), step.seconds))
                with replayed(number):
                    self._record(plan, step)
        return Replayed(len(self._log.steps), None, work)

    def _apply(self, kind: str, number: int) -> None:
        if kind == ADD:
            self.scheduler.add(self._sequence(self._log.requests[number]))
        elif kind == ABORT:
            self._loads.cancel(RequestId(str(number)))
            self.scheduler.abort(RequestId(str(number)))
        elif kind == RELEASE:
            self._allocator.pool.release(self._exports.pop(number, ()))
        else:
            self._allocator.reset_cache()

    def _sequence(self, request: LoggedRequest) -> Sequence:
        scope = str(request.scope)
        given = SequenceRequest(
            RequestId(str(request.number)),
            request.num_prompt,
            _SAMPLING,
            self._namers.of(scope, fingerprint=b"replay", block_tokens=self._allocator.block_tokens),
            max_tokens_total=request.max_tokens_total,
            eos_token_ids=_ENDS,
            scope=scope,
            priority=request.priority,
            exports=request.exports,
            keeps=request.keeps,
        )
        return Sequence(given, request.tokens[: request.num_given])

    def _plan(self) -> StepPlan:
        """Plan a step, as `Engine.step` does."""
        self._loads.take_in()
        self._loads.store_full_objects()
        plan = self._pipeline.take(self.scheduler.has_sequence) or self.scheduler.schedule()
        self._loads.start_planned()
        self.scheduler.take_started()
        return plan

    def _record(self, plan: StepPlan, step: LoggedStep) -> None:
        self._runner.step = step
        result = self._pipeline.run(plan, lambda: self.scheduler.follow(plan))
        for update in self.scheduler.update(plan, result):
            if update.export is not None:
                self._exports[self._num_exports] = update.export.blocks
                self._num_exports += 1
        self._loads.store_full_objects()
        self._allocator.index.take_changes()
        self.scheduler.blocks.take_progress()


class _LoggedRunner:
    """Runner of a pipeline that returns the logged tokens."""

    def __init__(self) -> None:
        self.step = LoggedStep()

    def run(self, plan: StepPlan) -> StepResult:
        """Return the tokens of the current step; tokens of sequences that have ended have no effect."""
        tokens = {number: tuple(map(SampledToken, ids)) for number, ids in self.step.tokens}
        for number in self.step.stopped:
            tokens[number] = (*tokens[number][:-1], SampledToken(END_TOKEN))
        unread = (SampledToken(0),)
        return StepResult({
            item.request_id: SequenceOutput(tokens.get(int(item.request_id), unread), item.num_scheduled)
            for item in plan.scheduled
            if item.num_sampled
        })  # fmt: skip

    def begin(self, plan: StepPlan) -> Launched:
        """Launch a step; its tokens are read together with its result."""
        return _Launched(self, plan)

    def may_follow(self, plan: StepPlan) -> bool:
        """Return whether the next step was launched ahead."""
        return self.step.is_ahead


@dataclass(frozen=True, slots=True)
class _Launched:
    runner: _LoggedRunner
    plan: StepPlan

    def result(self) -> StepResult:
        """Return the tokens of the current step."""
        return self.runner.run(self.plan)
