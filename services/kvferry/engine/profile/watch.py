"""The interface through which an engine and its runner report what they do.

Calls cost a few tens of nanoseconds while nothing is recorded, so that the engine needs no second path.
"""

from collections.abc import Mapping, Sequence

from kvferry.core.ids import RequestId
from kvferry.engine.messages import EngineRequest
from kvferry.engine.plan.kv_jobs import SequenceUpdate
from kvferry.engine.plan.step import StepPlan

MESSAGES, PLAN, COMPUTE, RECORD = "messages", "plan", "compute", "record"
"""Phases of the engine's thread in a step, in order: take in messages, plan, launch and wait, record the results."""
FORWARD, SAMPLE = "forward", "sample"
"""Phases of a runner that samples on the host."""


class StepWatch:
    """Receives the events of an engine; this class ignores them."""

    __slots__ = ()

    def added(self, request: EngineRequest, max_tokens_total: int) -> None:
        """A request was accepted; its sequence ends with `max_tokens_total` tokens at the latest."""

    def aborted(self, request_id: RequestId) -> None:
        """A request was aborted, perhaps one that had already ended."""

    def released(self, export: int) -> None:
        """The pages of an export are freed."""

    def reset(self) -> None:
        """The prefix cache was emptied."""

    def phase(self, name: str) -> None:
        """A phase of the engine's thread begins and the one before it ends."""

    def stepped(self, plan: StepPlan, updates: Sequence[SequenceUpdate], *, is_ahead: bool) -> None:
        """A step ended, perhaps with an empty plan.

        Args:
            plan: the plan.
            updates: results of its sequences, and of those that failed before it.
            is_ahead: whether the next step was launched before the results of this one were read.
        """

    def runner_phase(self, name: str) -> None:
        """A phase of the runner begins, on the thread that computes; an empty name ends the last one."""

    def kernels(self, seconds: Mapping[str, float]) -> None:
        """The seconds of each kind of kernel since the last call, summed over threads."""


NO_WATCH = StepWatch()
