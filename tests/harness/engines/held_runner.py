"""A runner whose steps wait for the test."""

import asyncio
import threading
from collections.abc import Callable

from harness.fakes.engines import ArithmeticRunner
from kvferry.engine.schedule.step.step import StepPlan, StepResult

SECONDS = 30.0


class HeldRunner:
    """Blocks every step from the `first`-th on until `go` is set, so that a test can act while a step runs."""

    def __init__(self, runner: ArithmeticRunner, *, first: int = 1) -> None:
        self._run: Callable[[StepPlan], StepResult] = runner.run
        self._first = first
        self.steps = 0
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        if self.steps >= self._first:
            self.reached.set()
            assert self.go.wait(SECONDS)
        return self._run(plan)

    async def wait_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, SECONDS)
