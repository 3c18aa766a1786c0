"""Step pipeline (asynchronous scheduling): the next step is launched before the tokens of the current step are read.

    host     begin 1 │ begin 2   result 1 │ begin 3   result 2 │ ..      plans and updates while the device computes
    device           └── step 1 ──┴── step 2 ──┴── step 3 ──┴ ..         never waits for the host

If a sequence ends while a step ahead is in flight, its results of that step are discarded, but the step may still write
to its pages. Each page that a step ahead writes to therefore has a writer until the step has ended: other sequences
write only in later steps and need no such fence, but a page without a reference stays in quarantine, so that no
transport gets it as the target of a load.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol, runtime_checkable

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockId, RequestId
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.step.step import ScheduledSequence, StepPlan, StepResult


class StepRunner(Protocol):
    """Part of the interface of `engine.execute.run.runner.Runner` that the engine uses."""

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        ...


class Launched(Protocol):
    """A step that has been launched."""

    def result(self) -> StepResult:
        """Wait for the step and return its result."""
        ...


@runtime_checkable
class PipelinedRunner(Protocol):
    """A runner that can launch a step before the previous step's result is read; at most two steps are in flight."""

    def begin(self, plan: StepPlan) -> Launched:
        """Launch a step."""
        ...

    def may_follow(self, plan: StepPlan) -> bool:
        """Return whether a step can be launched before its input tokens are on the host."""
        ...


class _Ahead(NamedTuple):
    """A launched step, and the pages that have a writer until it has ended."""

    plan: StepPlan
    launched: Launched
    pages: tuple[BlockId, ...]


class Pipeline:
    """Pipeline of an engine's steps. Not thread-safe."""

    def __init__(self, runner: StepRunner, allocator: Allocator, *, runs_ahead: bool = True) -> None:
        """
        Args:
            runner: computes the steps; if it lacks `begin` and `may_follow`, no steps are launched ahead.
            allocator: allocator of the pages that steps write to.
            runs_ahead: whether steps may be launched ahead.
        """
        self._runner = runner
        self._allocator = allocator
        # Checked once: a check against a protocol takes 30 us, which is one percent of a decode step.
        self._pipelined = runner if runs_ahead and isinstance(runner, PipelinedRunner) else None
        self._next: _Ahead | None = None

    @property
    def can_run_ahead(self) -> bool:
        """Whether steps may be launched ahead."""
        return self._pipelined is not None

    def observe(self, watch: object) -> None:
        """Report the phases of the runner to an `observe.watch.StepWatch`, if the runner can."""
        if hasattr(self._runner, "phases"):
            self._runner.phases = watch

    def take(self, has_sequence: Callable[[ScheduledSequence], bool]) -> StepPlan | None:
        """Return the plan that was launched ahead and must run next; `None` if no plan was launched ahead or all its
        sequences have ended."""
        if self._next is not None and not any(map(has_sequence, self._next.plan.scheduled)):
            self.drop()
        return None if self._next is None else self._next.plan

    def run(self, plan: StepPlan, follow: Callable[[], StepPlan | None]) -> StepResult:
        """Run a step; launch the next step before this step's tokens are read.

        Args:
            plan: the result of `take`, or a new plan if `take` returned `None`.
            follow: plans the next step, if that is possible before the results of this step are known.

        Raises:
            InvariantBroken: raised by the runner; no step remains in flight.
        """
        runner = self._pipelined
        if runner is None:
            return self._runner.run(plan)
        now = self._next or _Ahead(plan, runner.begin(plan), ())
        self._next = None
        following = follow()
        try:
            if following is not None and runner.may_follow(following):
                pages = self._written_pages(following)
                self._next = _Ahead(following, runner.begin(following), pages)
                self._allocator.pool.begin_write(pages)
            return now.launched.result()
        except InvariantBroken:
            self.drop()
            raise
        finally:
            self._allocator.pool.end_write(now.pages)

    def drop(self) -> None:
        """Wait for the step ahead, if any, and discard its results."""
        if self._next is not None:
            with suppress(InvariantBroken):  # errors are discarded like the results
                self._next.launched.result()
            self._allocator.pool.end_write(self._next.pages)
            self._next = None

    def _written_pages(self, plan: StepPlan) -> tuple[BlockId, ...]:
        """Return the pages that a step of decoding sequences writes to, one for each sequence and layer group."""
        size = self._allocator.block_tokens
        pages = [s.block_ids[s.num_computed // size] for s in plan.scheduled]
        pages += [ids[s.num_computed // size] for s in plan.scheduled for ids in s.further_ids]
        return tuple(pages)

    def in_flight(self, plan: StepPlan) -> set[RequestId]:
        """Return the requests in a running step and in the step launched after it."""
        plans = (plan,) if self._next is None else (plan, self._next.plan)
        return {item.request_id for each in plans for item in each.scheduled}

    @property
    def is_ahead(self) -> bool:
        """Whether a step was launched ahead and its result has not been read."""
        return self._next is not None
