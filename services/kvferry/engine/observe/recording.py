"""Records steps of an engine: a timeline for a trace file, and a log for a replay."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

from kvferry.core.clock import Clock
from kvferry.core.ids import RequestId
from kvferry.core.sampling import FinishReason, SamplingParams
from kvferry.engine.observe.step_log import (
    ABORT,
    ADD,
    RELEASE,
    RESET,
    EngineFacts,
    LoggedRequest,
    LoggedStep,
    StepLog,
    planned,
)
from kvferry.engine.observe.timeline import ENGINE, RUNNER, Timeline
from kvferry.engine.observe.watch import MESSAGES, StepWatch
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate
from kvferry.engine.schedule.step.step import StepPlan

MAX_STEPS = 10_000
_MAX_ITEMS = 2_000_000
"""Maximum total of planned sequences and tokens in a recording, about 200 MB."""
_IDLE_PER_STEP = 4
"""Maximum number of calls without a step that are recorded per requested step."""


class Recording(StepWatch):
    """A recording of a number of steps. Call its methods from the engine thread, except `runner_phase` and `kernels`,
    which the runner thread calls. Read the log after `is_full`."""

    def __init__(
        self,
        engine: EngineFacts,
        clock: Clock,
        *,
        steps: int,
        has_tokens: bool,
        obstacle: str = "",
        first_export: int = 0,
        on_full: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            engine: facts of the engine.
            clock: measures the phases.
            steps: number of steps to record.
            has_tokens: whether the log has the tokens of prompts and outputs, which a replay by an engine needs.
            obstacle: reason why the log cannot be replayed, if one is known.
            first_export: number of the engine's next export; the log counts from 0.
            on_full: called once, on the engine's thread, when all steps are recorded.
        """
        self.log = StepLog(engine, has_tokens, obstacle)
        self.timeline = Timeline()
        self.is_full = False
        self._clock, self._on_full, self._first_export = clock, on_full, first_export
        self._left, self._num_calls, self._items = steps, _IDLE_PER_STEP * steps, 0
        self._numbers: dict[RequestId, int] = {}
        self._next = 0
        self._scopes: dict[str, int] = {}
        self._step = LoggedStep()
        self._start = clock.monotonic()

    def finish(self) -> None:
        """End the recording before all steps are recorded. Idempotent."""
        if not self.is_full:
            self.is_full = True
            self._on_full()

    # ------------------------------------------------------------------ events of the engine

    def added(self, request: EngineRequest, max_tokens_total: int) -> None:
        if self.is_full:
            return
        number = self._number(request.request_id, is_new=True)
        for reason in _obstacles(request):
            self._hinder(reason)
        num_prompt = len(request.token_ids) - request.num_generated
        logged = LoggedRequest(
            number,
            self._scopes.setdefault(request.scope, len(self._scopes)),
            num_prompt,
            request.num_generated,
            max_tokens_total,
            request.priority,
            request.exports,
            request.keeps,
            request.sample_index,
            tokens=list(request.token_ids),
        )
        if self.log.has_tokens:
            logged.sampling = _sampling(request.sampling)
        self._items += len(request.token_ids)
        self.log.requests[number] = logged
        self._step.events.append((ADD, number))

    def aborted(self, request_id: RequestId) -> None:
        if not self.is_full and request_id in self._numbers:
            self._step.events.append((ABORT, self._numbers[request_id]))

    def released(self, export: int) -> None:
        if not self.is_full and export >= self._first_export:
            self._step.events.append((RELEASE, export - self._first_export))

    def reset(self) -> None:
        if not self.is_full:
            self._step.events.append((RESET, 0))

    def phase(self, name: str) -> None:
        if self.is_full:
            return
        now = self._now()
        if name == MESSAGES:
            self._step.begun = now
        self.timeline.begin(ENGINE, name, now)

    def stepped(self, plan: StepPlan, updates: Sequence[SequenceUpdate], *, is_ahead: bool) -> None:
        if self.is_full:
            return
        step = self._step
        step.ended, step.is_ahead = self._now(), is_ahead
        self.timeline.end(ENGINE, step.ended)
        step.plan = planned(plan, self._number)
        if any(item.num_drafts for item in plan.scheduled):
            self._hinder("drafts were verified, but proposals are not recorded")
        for update in updates:
            self._update(step, update)
        self.log.steps.append(step)
        self._step = LoggedStep()
        self._items += len(step.plan)
        self._num_calls -= 1
        self._left -= bool(plan.scheduled)
        if not self._left or not self._num_calls or self._items >= _MAX_ITEMS:
            self.finish()

    def runner_phase(self, name: str) -> None:
        if not self.is_full:
            self.timeline.begin(RUNNER, name, self._now())

    def kernels(self, seconds: Mapping[str, float]) -> None:
        if not self.is_full:
            self.timeline.kernels(seconds)

    # ------------------------------------------------------------------ internals

    def _now(self) -> float:
        return self._clock.monotonic() - self._start

    def _number(self, request_id: RequestId, *, is_new: bool = False) -> int:
        number = self._numbers.get(request_id)
        if number is None or is_new:
            if not is_new:
                self._hinder("requests were running when the recording began")
            number = self._numbers[request_id] = self._next
            self._next += 1
        return number

    def _update(self, step: LoggedStep, update: SequenceUpdate) -> None:
        number = self._number(update.request_id)
        if update.error is not None or update.embedding is not None:
            self._hinder("a request failed" if update.error is not None else "a vector was computed")
            return
        tokens = [token.token_id for token in update.tokens]
        step.tokens.append((number, tokens))
        self._items += len(tokens)
        if update.finish_reason is FinishReason.STOP:
            step.stopped.append(number)
        logged = self.log.requests.get(number)
        if logged is not None:
            logged.tokens += tokens

    def _hinder(self, reason: str) -> None:
        self.log.obstacle = self.log.obstacle or reason


def _obstacles(request: EngineRequest) -> list[str]:
    """Return the reasons why a replay cannot repeat a request."""
    found = {
        "KV was fetched from another worker": request.remote is not None,
        "a vector was computed": request.pooling is not None,
        "an adapter was used": request.adapter is not None,
        "a request had a deadline": request.deadline is not None,
        "an output was constrained": request.sampling.constraint is not None,
        "tokens of a prompt were scored": request.sampling.prompt_logprobs is not None,
    }
    return [reason for reason, is_so in found.items() if is_so]


def _sampling(sampling: SamplingParams) -> dict[str, object]:
    """Return the parameters that differ from the defaults."""
    default = SamplingParams()
    return {
        one.name: getattr(sampling, one.name)
        for one in fields(sampling)
        if getattr(sampling, one.name) != getattr(default, one.name)
    }
