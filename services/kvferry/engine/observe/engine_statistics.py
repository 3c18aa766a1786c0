"""Counters and histograms of an engine: what its steps computed, and how long its requests took.

arrive ── queue ──► start ── prefill ──► first token ── inter-token ──► ... ──► end
   └────── time to first token ──────────────┘
   └──────────────────────── whole request ─────────────────────────────────────┘
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvferry.core.histogram import Histogram
from kvferry.core.ids import RequestId
from kvferry.core.metrics import worker_metrics
from kvferry.core.metrics.metric import Metric
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate
from kvferry.engine.schedule.step.step import StepPlan


def _of(metric: Metric) -> Histogram:
    return Histogram(metric.buckets)


@dataclass(slots=True)
class _Times:
    """A request's prompt tokens, and the times of its phases in monotonic seconds; `None` for phases that have not been
    reached."""

    arrived: float
    num_prompt: int
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_output: int = 0


@dataclass(slots=True)
class EngineStatistics:
    """Statistics of one engine since its start. Written on the engine's thread, read on any thread."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of all requests that started."""
    num_output_tokens: int = 0
    num_finished: int = 0
    step_tokens: Histogram = field(default_factory=lambda: _of(worker_metrics.STEP_TOKENS))
    step_sequences: Histogram = field(default_factory=lambda: _of(worker_metrics.STEP_SEQUENCES))
    queue_seconds: Histogram = field(default_factory=lambda: _of(worker_metrics.QUEUE_SECONDS))
    prefill_seconds: Histogram = field(default_factory=lambda: _of(worker_metrics.PREFILL_SECONDS))
    first_token_seconds: Histogram = field(default_factory=lambda: _of(worker_metrics.FIRST_TOKEN_SECONDS))
    inter_token_seconds: Histogram = field(default_factory=lambda: _of(worker_metrics.INTER_TOKEN_SECONDS))
    request_seconds: Histogram = field(default_factory=lambda: _of(worker_metrics.REQUEST_SECONDS))
    decode_seconds: Histogram = field(default_factory=lambda: _of(worker_metrics.DECODE_SECONDS))
    output_token_seconds: Histogram = field(default_factory=lambda: _of(worker_metrics.OUTPUT_TOKEN_SECONDS))
    prompt_lengths: Histogram = field(default_factory=lambda: _of(worker_metrics.REQUEST_PROMPT_TOKENS))
    output_lengths: Histogram = field(default_factory=lambda: _of(worker_metrics.REQUEST_OUTPUT_TOKENS))
    _times: dict[RequestId, _Times] = field(default_factory=dict)

    def arrive(self, request_id: RequestId, num_prompt: int, now: float) -> None:
        """Record the arrival of a request with this number of prompt tokens.

        Args:
            request_id: id of the request.
            num_prompt: number of prompt tokens.
            now: current time in monotonic seconds.
        """
        self._times[request_id] = _Times(now, num_prompt)

    def start(self, started: Iterable[RequestId], now: float) -> None:
        """Record that requests take part in a step for the first time.

        Args:
            started: the requests in the step; those that were started before are ignored.
            now: current time in monotonic seconds.
        """
        for request_id in started:
            times = self._times.get(request_id)
            if times is not None and times.started is None:
                times.started = now
                self.queue_seconds.observe(now - times.arrived)
                self.num_prompt_tokens += times.num_prompt

    def record(self, plan: StepPlan, updates: Sequence[SequenceUpdate], now: float) -> None:
        """Record a step and the tokens that it sampled.

        Args:
            plan: the step's plan.
            updates: the results of its sequences.
            now: current time in monotonic seconds.
        """
        self.num_steps += 1
        self.step_tokens.observe(plan.num_tokens)
        self.step_sequences.observe(len(plan.scheduled))
        for update in updates:
            times = self._times.get(update.request_id)
            if times is None:
                continue
            if update.tokens:
                self._sampled(times, len(update.tokens), now)
            if update.finish_reason is not None or update.export is not None:
                self._finished(times, now)
                self.forget(update.request_id)
            elif update.error is not None:
                self.forget(update.request_id)

    def forget(self, request_id: RequestId) -> None:
        """Drop the times of a request that has ended. Idempotent."""
        self._times.pop(request_id, None)

    @property
    def num_open(self) -> int:
        """Number of requests that have arrived and not ended."""
        return len(self._times)

    def _finished(self, times: _Times, now: float) -> None:
        self.num_finished += 1
        self.request_seconds.observe(now - times.arrived)
        self.prompt_lengths.observe(times.num_prompt)
        self.output_lengths.observe(times.num_output)
        if times.first_token is not None and times.last_token is not None and times.num_output > 1:
            seconds = times.last_token - times.first_token
            self.decode_seconds.observe(seconds)
            self.output_token_seconds.observe(seconds / (times.num_output - 1))

    def _sampled(self, times: _Times, count: int, now: float) -> None:
        self.num_output_tokens += count
        times.num_output += count
        if times.last_token is None:
            times.first_token = now
            self.first_token_seconds.observe(now - times.arrived)
            self.prefill_seconds.observe(now - (times.arrived if times.started is None else times.started))
        else:
            self.inter_token_seconds.observe((now - times.last_token) / count)
        times.last_token = now
