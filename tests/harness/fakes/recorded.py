"""Recorded runs of an engine whose runner samples numbers that depend on the position."""

from collections.abc import Sequence
from typing import Any

from harness.fakes.small_engine import engine_for
from kvferry.core.clock import ManualClock
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SampledToken, SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.engine import Engine
from kvferry.engine.loop.record_steps import RecordingSettings, begin_recording, end_recording
from kvferry.engine.observe.step_log import StepLog
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.step.step import SequenceOutput, StepPlan, StepResult

EOS = 7


class CountingRunner:
    """A runner whose token at position n is a function of n; every ninth token is `EOS`."""

    def run(self, plan: StepPlan) -> StepResult:
        """Return a token for each sampled row."""
        return StepResult({
            s.request_id: SequenceOutput((SampledToken(_token(s.num_computed + s.num_scheduled)),), s.num_scheduled)
            for s in plan.scheduled if s.num_sampled
        })  # fmt: skip


class LaunchingRunner(CountingRunner):
    """A `CountingRunner` for a pipeline that launches steps ahead."""

    def begin(self, plan: StepPlan) -> "_Launched":
        """Launch a step."""
        return _Launched(self.run(plan))

    def may_follow(self, plan: StepPlan) -> bool:
        """Return `True`: tokens do not depend on earlier ones."""
        return True


class _Launched:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        """Return the result."""
        return self._result


def _token(position: int) -> int:
    return EOS if position % 9 == 0 else 100 + position % 61


def an_engine(
    *, limits: SchedulerLimits | None = None, blocks: int = 64, eos: bool = False, ahead: bool = False
) -> Engine:
    """Create an engine of 16-token blocks."""
    return engine_for(
        LaunchingRunner() if ahead else CountingRunner(), num_blocks=blocks, block_tokens=16, max_model_tokens=512,
        vocab_size=1 << 20, eos_token_ids=(EOS,) if eos else (), limits=limits or SchedulerLimits(),
        runs_ahead=ahead, clock=ManualClock(),
    )  # fmt: skip


def a_request(name: str, num_prompt: int, num_output: int, *, first: int = 1000, **more: Any) -> EngineRequest:
    """Create a request whose prompt counts up from `first`."""
    tokens = list(range(first, first + num_prompt))
    return EngineRequest(RequestId(name), tokens, SamplingParams(temperature=0.0, max_tokens=num_output), **more)


def run_all(engine: Engine) -> None:
    """Step until the engine is idle."""
    for _ in range(5000):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("the engine does not become idle")


def record(
    arrivals: Sequence[tuple[int, EngineRequest]],
    *,
    has_tokens: bool = False,
    limits: SchedulerLimits | None = None,
    blocks: int = 64,
    eos: bool = False,
    ahead: bool = False,
    aborts: Sequence[tuple[int, str]] = (),
) -> StepLog:
    """Run requests that arrive before given steps on a new engine, and return the log of its steps."""
    engine = an_engine(limits=limits, blocks=blocks, eos=eos, ahead=ahead)
    recording = begin_recording(engine, RecordingSettings(ManualClock(), 5000, "counting", has_tokens=has_tokens))
    pending, ending = sorted(arrivals, key=lambda one: one[0]), sorted(aborts)
    number = 0
    while pending or engine.has_work:
        while pending and pending[0][0] <= number:
            engine.add(pending.pop(0)[1])
        while ending and ending[0][0] <= number:
            engine.abort(RequestId(ending.pop(0)[1]))
        for export in engine.step().exports.values():
            engine.release_export(export)
        number += 1
    end_recording(engine, recording)
    engine.check_integrity()
    return recording.log
