"""Steps and copies of the stand-in device.

A GPU computes steps and copies after their launch, and the host detects their end only with a stream or an event. Here
a launched step is computed as late as possible: when its tokens are read, or when a copy that is ordered after it is
made. A copy without that order reads pages that are not written yet, and a step without sampled rows ends, for the
host, before it is computed, as on a GPU.
"""

import threading
from dataclasses import dataclass

import numpy as np
import torch

from harness.device.device_trace import DeviceTrace
from kvferry.engine.build import EnginePages, LoadedModel
from kvferry.engine.execute.gpu.host_mirror import HostMirror
from kvferry.engine.execute.models.model import Model
from kvferry.engine.execute.run.runner import ComputedStep, PreparedStep
from kvferry.engine.execute.run.threaded_runner import LaunchedStep, ThreadedRunner
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.step.step import StepPlan, StepResult
from kvferry.kernels.host_copies import HostCopies
from kvferry.kv.interface.connector import PageMemory
from kvferry.kv.pages.layout import KvLayout

POISON = 0xFF
"""Each float of these bytes is a NaN."""


class DeviceLost(RuntimeError):
    """The error of a lost device."""


class LateRunner(ThreadedRunner):
    """A runner that computes launched steps in order, each when it is demanded."""

    def __init__(self, model: Model, kv: PagedKv) -> None:
        super().__init__(model, kv)
        self._turn = threading.Condition()
        self._demanded = 0
        self.launched = 0
        self.computed = 0
        self.trace = DeviceTrace()
        self.breaks_at = 0
        """Number of the step that fails as on a lost device; 0: none."""

    def run(self, plan: StepPlan) -> StepResult:
        return self.begin(plan).result() if plan.scheduled else StepResult({})

    def begin(self, plan: StepPlan) -> "LateStep":  # type: ignore[override]
        with self._turn:
            self.launched += 1
            number = self.launched
        self.trace.step(number)
        return LateStep(self, number, super().begin(plan), plan)

    def compute(self, step: PreparedStep) -> ComputedStep:
        with self._turn:
            number = self.computed + 1
            assert self._turn.wait_for(lambda: self._demanded >= number, 60), "the step was not demanded within 60 s"
        if number == self.breaks_at:
            raise DeviceLost("CUDA error: uncorrectable ECC error encountered")
        computed = super().compute(step)
        with self._turn:
            self.computed = number
            self._turn.notify_all()
        return computed

    def demand(self, number: int) -> None:
        """Allow the computation of all steps up to a number."""
        with self._turn:
            self._demanded = max(self._demanded, number)
            self._turn.notify_all()

    def wait(self, number: int) -> None:
        """Wait until all steps up to a number are computed."""
        self.demand(number)
        with self._turn:
            assert self._turn.wait_for(lambda: self.computed >= number, 60)


@dataclass(frozen=True)
class LateStep:
    """A launched step."""

    runner: LateRunner
    number: int
    inner: LaunchedStep
    plan: StepPlan

    def result(self) -> StepResult:
        """Return the result; wait only if tokens are read."""
        if not any(s.num_sampled or s.num_scored for s in self.plan.scheduled):
            return StepResult({})
        self.runner.demand(self.number)
        self.runner.trace.read(self.number)
        return self.inner.result()


class LateStream:
    """`CopyStream` of the stand-in: copies are made when they are waited for, after the steps that they are ordered
    after, and no others."""

    def __init__(self, runner: LateRunner) -> None:
        self.runner = runner
        self._after = 0
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def after_steps(self) -> None:
        self._after = self.runner.launched
        self.runner.trace.after_steps()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.runner.trace.copy(len(target))
        target.fill_(POISON)
        self._copies.append((target, source))

    def wait(self) -> None:
        self.runner.trace.settle()
        self.runner.wait(self._after)
        for target, source in self._copies:
            target.copy_(source)
        self._copies.clear()


def late_pages(loaded: LoadedModel, memory: PageMemory) -> EnginePages:
    """Return pages on the stand-in device, with `memory` as their mirror; both begin as NaNs."""
    layout = KvLayout.of(loaded.config, block_tokens=loaded.settings.block_tokens, dtype=loaded.dtype)
    device = np.full(loaded.num_blocks * layout.block_bytes, POISON, np.uint8)
    np.frombuffer(memory.pages, np.uint8)[:] = POISON
    runner = LateRunner(loaded.model, PagedKv.over(layout, device.data))
    copies = HostCopies(runner.kv.pages, memory.pages, LateStream(runner))
    return EnginePages(runner, HostMirror(copies, memory.epochs, seconds=20))
