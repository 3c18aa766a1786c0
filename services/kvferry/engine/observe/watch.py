"""The interface through which an engine and its runner report what they do.

Calls cost a few tens of nanoseconds while nothing is recorded, so the engine needs no separate path.
"""

from collections.abc import Mapping, Sequence

from kvferry.core.ids import RequestId
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate
from kvferry.engine.schedule.step.step import StepPlan

MESSAGES, PLAN, COMPUTE, RECORD = "messages", "plan", "compute", "record"
"""Phases of the engine's thread in a step, in order: process messages, plan, launch and wait, record the results."""
FORWARD, SAMPLE = "forward", "sample"
"""Phases of a runner that samples on the host."""


class StepWatch:
    """Receives the events of an engine; this class ignores them."""

    __slots__ = ()

    def added(self, request: EngineRequest, max_tokens_total: int) -> None:
        """Handle the acceptance of a request; its sequence has at most `max_tokens_total` tokens.

        Args:
            request: the accepted request.
            max_tokens_total: maximum number of tokens of its sequence, prompt and output.
        """

    def aborted(self, request_id: RequestId) -> None:
        """Handle the abort of a request, which may already have ended."""

    def released(self, export: int) -> None:
        """Handle the release of an export's pages."""

    def reset(self) -> None:
        """Handle a reset of the prefix cache."""

    def phase(self, name: str) -> None:
        """Handle the start of a phase on the engine's thread, which ends the phase before it."""

    def stepped(self, plan: StepPlan, updates: Sequence[SequenceUpdate], *, is_ahead: bool) -> None:
        """Handle the end of a step, whose plan may be empty.

        Args:
            plan: the plan.
            updates: results of its sequences, and of sequences that failed before it.
            is_ahead: whether the next step was launched before the results of this one were read.
        """

    def runner_phase(self, name: str) -> None:
        """Handle the start of a phase on the runner's thread; an empty name ends the last phase."""

    def kernels(self, seconds: Mapping[str, float]) -> None:
        """Handle the time spent in each kind of kernel since the last call, in seconds, summed over threads."""


NO_WATCH = StepWatch()
