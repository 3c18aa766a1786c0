"""Runner with a compute thread: the engine's thread records a step and plans the next one while kernels run.

    engine thread    begin 1   begin 2 | result 1, update 1, begin 3 | result 2, ..
    compute thread             step 1  | step 2                      | step 3

A step launched before the previous one has ended lacks the token of each of its sequences; the compute thread inserts
the token as soon as it is sampled. Kernels release the interpreter lock, so both threads run at the same time.
"""

import queue
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import overload

from kvferry.core.errors import InvariantBroken
from kvferry.core.process.exit_threads import start_thread
from kvferry.engine.execute.models.model import Model
from kvferry.engine.execute.run.runner import ComputedStep, PreparedStep, Runner
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.step.step import StepPlan, StepResult


class TokensAhead(Sequence[int]):
    """The tokens of a sequence and one more, which is set when it has been sampled. The scheduler may append to its own
    list meanwhile."""

    __slots__ = ("_known", "_num_known", "last")

    def __init__(self, known: Sequence[int]) -> None:
        self._known = known
        self._num_known = len(known)
        self.last = 0

    def __len__(self) -> int:
        return self._num_known + 1

    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice, /) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [*self._known[: self._num_known], self.last][index]
        if index < 0:
            index += self._num_known + 1
        if index < self._num_known:
            return self._known[index]
        if index > self._num_known:
            raise IndexError(index)
        return self.last


class LaunchedStep:
    """A step for the compute thread. That thread does only the work that the next step needs: the engine's thread
    builds the batch before it and the result after it."""

    def __init__(self, runner: Runner, plan: StepPlan, previous: "LaunchedStep | None") -> None:
        """
        Args:
            runner: computes the step.
            plan: the plan. If it lacks the input tokens of decoding sequences, `previous` samples them.
            previous: the step before this one; `None` if all input tokens are known.

        Raises:
            InvariantBroken: the plan does not match its sequences.
        """
        self._given: list[tuple[int, TokensAhead]] = []
        if previous is not None:
            rows = {item.request_id: row for row, item in enumerate(previous._prepared.plan.scheduled)}
            self._given = [(rows[s.request_id], TokensAhead(s.token_ids)) for s in plan.scheduled]
            items = zip(plan.scheduled, self._given, strict=True)
            plan = StepPlan(tuple(replace(s, token_ids=tokens) for s, (_, tokens) in items))
        self._prepared: PreparedStep = runner.prepare(plan)
        self._runner: Runner | None = runner
        self._previous = previous
        self._running = threading.Lock()  # a lock wakes the next step several times faster than an Event
        self._running.acquire()
        self._computed: ComputedStep | None = None
        self._error: BaseException | None = None

    def result(self) -> StepResult:
        """Wait for the step and return its result.

        Raises:
            InvariantBroken: this step or the one before it failed.
        """
        with self._running:
            pass
        if self._error is not None:
            raise self._error
        assert self._computed is not None, "a step ended with neither a result nor an error"
        return self._computed.result()

    def compute(self) -> None:
        """Compute the step. Called on the compute thread, in the order of steps."""
        try:
            assert self._runner is not None, "a step was computed twice"
            if self._previous is not None:
                self._insert_tokens(self._previous)
            self._computed = self._runner.compute(self._prepared)
        except BaseException as error:  # raised again on the engine's thread
            self._error = error
        finally:
            self._previous = self._runner = None  # the end of the runner ends the thread
            self._running.release()

    def _insert_tokens(self, previous: "LaunchedStep") -> None:
        if previous._computed is None:
            raise InvariantBroken("the step before this one failed")
        tokens = previous._computed.tokens
        for row, given in self._given:
            given.last = tokens[row]
        self._prepared.batch.token_ids[:] = [tokens[row] for row, _ in self._given]


class ThreadedRunner(Runner):
    """Runner that computes steps on its own thread, which ends with the runner."""

    def __init__(self, model: Model, kv: PagedKv) -> None:
        """
        Raises:
            InvariantBroken: shape, dtype or device of the pages differ from the model's.
        """
        super().__init__(model, kv)
        self._steps: queue.SimpleQueue[LaunchedStep | None] = queue.SimpleQueue()
        self._last: LaunchedStep | None = None
        stop = partial(self._steps.put, None)
        start_thread(partial(_compute_all, self._steps), "steps", stop)
        weakref.finalize(self, stop)

    def begin(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step after all previously launched steps. If input tokens are not known yet, the previous step
        samples them.

        Raises:
            InvariantBroken: the plan does not match its sequences.
        """
        is_ahead = any(s.num_computed == len(s.token_ids) for s in plan.scheduled)
        step = LaunchedStep(self, plan, self._last if is_ahead else None)
        self._last = step
        self._steps.put(step)
        return step

    def may_follow(self, plan: StepPlan) -> bool:
        """Return `True`: the compute thread has the tokens of every step before it computes the next one."""
        return True


def _compute_all(steps: "queue.SimpleQueue[LaunchedStep | None]") -> None:
    while (step := steps.get()) is not None:
        step.compute()
        del step  # otherwise this thread would keep its result until the next step
