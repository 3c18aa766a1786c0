"""A step log: the requests that an engine received, and its plans, step by step. Written as JSON lines.

    {"kvferry_steps": 1, "engine": {...}, "has_tokens": false, ...}                       the head
    {"events": [["add", 0], ["abort", 3]], "plan": [[0, 0, 40, 1]], "tokens": [[0, [17]]], ...}    one for each step
    {"request": 0, "num_prompt": 40, "names": [..], ...}                                  one for each request

A log begins with an idle engine and an empty prefix cache, so a scheduler that receives the same events between the
same steps plans the same steps (`simulator.worker.step_replay`). `obstacle` is the reason if this does not hold.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.core.ids import RequestId
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.schedule.step.step import StepPlan

Planned = tuple[int, int, int, int]
"""Number of a request; tokens computed before the step; tokens scheduled and rows sampled in the step."""
Event = tuple[str, int]
"""One of `EVENTS`, and the number of the request or of the export; 0 for `reset`."""
ADD, ABORT, RELEASE, RESET = "add", "abort", "release", "reset"
EVENTS = (ADD, ABORT, RELEASE, RESET)


def planned(plan: StepPlan, number: Callable[[RequestId], int] = int) -> list[Planned]:
    """Return a plan in the form in which it is logged.

    Args:
        plan: the plan of a step.
        number: returns the number of a request; by default, its id is the number.
    """
    return [(number(s.request_id), s.num_computed, s.num_scheduled, s.num_sampled) for s in plan.scheduled]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Properties of the recorded engine that a replay needs."""

    num_blocks: int
    block_tokens: int
    limits: SchedulerLimits
    runs_ahead: bool
    model: str = ""


@dataclass(slots=True)
class LoggedRequest:
    """A request; the fields correspond to those of `EngineRequest`."""

    number: int
    scope: int
    """Number of the scope of its KV; requests of two scopes share no blocks."""
    num_prompt: int
    num_generated: int
    max_tokens_total: int
    priority: int = 0
    exports: bool = False
    keeps: bool = False
    sample_index: int = 0
    tokens: list[int] = field(default_factory=list)
    """Tokens of the prompt and the known output, if the log has tokens."""
    names: list[int] = field(default_factory=list)
    """Ids of the full blocks of the prompt and the known output, if the log has no tokens."""
    sampling: dict[str, object] = field(default_factory=dict)
    """Sampling parameters that differ from the defaults, if the log has tokens."""

    @property
    def num_given(self) -> int:
        """Tokens at its arrival: the prompt, and tokens generated earlier."""
        return self.num_prompt + self.num_generated


@dataclass(slots=True)
class LoggedStep:
    """One step. Times are seconds since the beginning of the log."""

    events: list[Event] = field(default_factory=list)
    """Events since the previous step, in order."""
    plan: list[Planned] = field(default_factory=list)
    tokens: list[tuple[int, list[int]]] = field(default_factory=list)
    """Number of a request and its sampled tokens; in a log without tokens, -1 for each token."""
    stopped: list[int] = field(default_factory=list)
    """Requests whose last token in this step is an end token."""
    is_ahead: bool = False
    begun: float = 0.0
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.ended - self.begun


@dataclass(slots=True)
class StepLog:
    """A step log."""

    engine: EngineFacts
    has_tokens: bool
    obstacle: str = ""
    """Why the log cannot be replayed; empty if it can."""
    requests: dict[int, LoggedRequest] = field(default_factory=dict)
    steps: list[LoggedStep] = field(default_factory=list)
