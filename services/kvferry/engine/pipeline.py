"""Launches steps and reads their tokens; where the runner can, the next step is launched before these are read.

    host     begin 1 │ begin 2   result 1 │ begin 3   result 2 │ ..      plans and books while the device computes
    device           └── step 1 ──┴── step 2 ──┴── step 3 ──┴ ..         never waits for the host

What a step ahead computed for a sequence that has ended meanwhile is passed over. Its pages may be somebody else's by
then: whoever has them writes them in a later step, and the device takes steps in their order.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, runtime_checkable

from kvferry.core.errors import InvariantBroken
from kvferry.engine.step import ScheduledSequence, StepPlan, StepResult


class StepRunner(Protocol):
    """What the engine needs of `engine.runner.Runner`."""

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        ...


class Launched(Protocol):
    """A step under way."""

    def result(self) -> StepResult:
        """Wait for its tokens."""
        ...


@runtime_checkable
class AheadRunner(Protocol):
    """A runner whose steps can be launched one after the other before the first is read; at most two at a time."""

    def begin(self, plan: StepPlan) -> Launched:
        """Launch a step."""
        ...

    def may_follow(self, plan: StepPlan) -> bool:
        """Whether a step could be launched now, although the tokens that it computes are not known to the host."""
        ...


class Pipeline:
    """The steps of one engine. One thread."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._next: tuple[StepPlan, Launched] | None = None

    def take(self, is_wanted: Callable[[ScheduledSequence], bool]) -> StepPlan | None:
        """The step that was launched ahead and must be run next; `None`: there is none that anybody still wants."""
        if self._next is not None and not any(map(is_wanted, self._next[0].scheduled)):
            self.drop()
        return None if self._next is None else self._next[0]

    def run(self, plan: StepPlan, follow: Callable[[], StepPlan | None]) -> StepResult:
        """The tokens of a step.

        Args:
            plan: what `take` gave, or another if that was none.
            follow: the step after it, if it can be planned before this one is booked.

        Raises:
            InvariantBroken: as the runner says; nothing is under way then.
        """
        if not isinstance(self._runner, AheadRunner):
            return self._runner.run(plan)
        launched = self._runner.begin(plan) if self._next is None else self._next[1]
        self._next = None
        following = follow()
        try:
            if following is not None and self._runner.may_follow(following):
                self._next = following, self._runner.begin(following)
            return launched.result()
        except InvariantBroken:
            self.drop()
            raise

    def drop(self) -> None:
        """Wait for the step ahead, if there is one, and forget what it drew."""
        if self._next is not None:
            with suppress(InvariantBroken):  # whatever is wrong with it is nobody's any more
                self._next[1].result()
            self._next = None

    @property
    def is_ahead(self) -> bool:
        """Whether a step was launched that nobody has read."""
        return self._next is not None
