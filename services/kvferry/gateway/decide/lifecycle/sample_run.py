"""The state of one sample across attempts, emitted tokens, ticket and failures, and its spans. No I/O.

A sample without a trace has `NO_TRACE`, whose methods do nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from kvferry.core.causes import ComputedTokens
from kvferry.core.errors import KvferryError
from kvferry.core.inference.chunks import KvReport, Timing
from kvferry.core.inference.pooling import PoolingParams
from kvferry.core.pausing import with_version
from kvferry.core.philox import uniform
from kvferry.core.retention import Retention
from kvferry.core.sampling import FinishReason, SampledToken, ScoredToken
from kvferry.core.traces.spans import Attribute, Span, SpanKind
from kvferry.gateway.decide.config import RetryConfig
from kvferry.gateway.decide.estimates.estimates import Commitment
from kvferry.gateway.decide.lifecycle.computed_causes import summed
from kvferry.gateway.decide.lifecycle.sample_states import MACHINE, SampleEvent, State
from kvferry.gateway.decide.routing.cached_prefix import PromptNames
from kvferry.gateway.decide.routing.route_notes import RouteNote
from kvferry.gateway.decide.routing.routes import Pick, Route
from kvferry.serving.request import Request
from kvferry.serving.token_source import TokenEvent

Metadata = tuple[tuple[str, str], ...]
_NO_CALL: AbstractContextManager[Metadata | None] = nullcontext()
_MAX_REPORTS = 16


class NoTrace:
    """The trace of a sample that is not traced."""

    def routed(self, start: float, route: Route) -> None:
        """Record a routing decision that was begun at `start`, monotonic seconds."""

    def call(self, name: str, pick: Pick) -> AbstractContextManager[Metadata | None]:
        """Record a call to a worker for the length of the `with` block; yields the metadata for the call.

        Args:
            name: name of the span.
            pick: the worker.
        """
        return _NO_CALL

    def answered(self) -> None:
        """Record that the call has returned all requested results; its reader may then leave it."""

    def handed_off(self, timing: Timing) -> None:
        """Record the source of the prompt's KV, as the decode worker has reported it."""

    def lost(self, error: KvferryError, worker: str | None, num_emitted: int) -> None:
        """Record that a call to a worker failed.

        Args:
            error: error of the call.
            worker: address of the worker; `None` if no worker was found.
            num_emitted: number of output tokens before the loss.
        """

    def resumed(self, num_emitted: int) -> None:
        """Record that the stream continues after a loss, with the next token after `num_emitted`."""

    def end(self, outcome: str, error: KvferryError | None, counts: dict[str, int]) -> None:
        """End the sample.

        Args:
            outcome: final state of the sample, `done` after a complete output.
            error: last error of the sample, whose reason is recorded unless the outcome is `done`; `None` without an
                error.
            counts: further attributes of the span: numbers of tokens and of resumptions.
        """


NO_TRACE = NoTrace()


class SampleTrace(NoTrace):
    """The trace of a sample, as a child of the request's span."""

    def __init__(self, request: Span, name: str, sample_index: int, start: float) -> None:
        """
        Args:
            request: span of the request.
            name: name of the sample's span.
            sample_index: index of the sample in its request.
            start: monotonic time in seconds.
        """
        self._span = request.child(name, start, {"kvferry.sample_index": sample_index})
        self._call: Span | None = None
        self._is_answered = False

    def routed(self, start: float, route: Route) -> None:
        attributes: dict[str, Attribute] = {
            "kvferry.route.reason": route.reason.value,
            "kvferry.route.decode": route.decode.replica.worker_id,
            "kvferry.route.cached_tokens": (route.prefill or route.decode).cached.tokens,
            "kvferry.route.candidates": (route.prefill or route.decode).num_candidates,
        }
        if route.prefill is not None:
            attributes["kvferry.route.prefill"] = route.prefill.replica.worker_id
        self._span.phase("route", start, attributes=attributes)

    @contextmanager
    def _called(self, name: str, pick: Pick) -> Iterator[Metadata]:
        attributes: dict[str, Attribute] = {
            "kvferry.worker": pick.replica.worker_id,
            "server.address": pick.replica.address,
        }
        span = self._call = self._span.child(name, attributes=attributes, kind=SpanKind.CLIENT)
        failure, self._is_answered = "cancelled", False
        try:
            yield span.context.metadata
            failure = ""
        except Exception as error:
            inner = getattr(error, "error", error)
            failure = inner.reason.lower() if isinstance(inner, KvferryError) else type(inner).__name__
            raise
        finally:
            self._call = None
            span.end("" if self._is_answered else failure)

    def call(self, name: str, pick: Pick) -> AbstractContextManager[Metadata | None]:
        return self._called(name, pick)

    def answered(self) -> None:
        self._is_answered = True

    def handed_off(self, timing: Timing) -> None:
        if self._call is not None:
            self._call.set(
                {
                    "kvferry.handoff.outcome": timing.handoff_outcome,
                    "kvferry.handoff.connector": timing.connector,
                    "kvferry.handoff.blocks": timing.handoff_blocks,
                    "kvferry.handoff.bytes": timing.handoff_bytes,
                    "kvferry.handoff.seconds": timing.handoff_seconds,
                }
            )

    def lost(self, error: KvferryError, worker: str | None, num_emitted: int) -> None:
        self._span.event(
            "lost",
            {"error.type": error.reason.lower(), "server.address": worker or "", "kvferry.output_tokens": num_emitted},
        )

    def resumed(self, num_emitted: int) -> None:
        self._span.event("resumed", {"kvferry.output_tokens": num_emitted})

    def end(self, outcome: str, error: KvferryError | None, counts: dict[str, int]) -> None:
        self._span.set({"kvferry.outcome": outcome, **counts})
        reason = "" if outcome == "done" else outcome if error is None else error.reason.lower()
        self._span.end(reason)


@dataclass(frozen=True, slots=True)
class SealedTicket:
    """The ticket of a prefill worker's offer for this sample; only workers can open it."""

    ticket_id: str
    sealed: bytes
    address: str
    """Address of the prefill worker."""
    fingerprint: bytes
    """Layout fingerprint of the blocks; decode workers with the same fingerprint read them without conversion."""
    family: bytes = b""
    """Layout family of the blocks; decode workers of the same family can convert them. Empty if conversion is not
    possible."""
    deliveries: int = 0
    """Number of times that the ticket was sent to a decode worker; also the attempt number."""
    losses: int = 0
    """Number of decode workers that were lost while using the ticket."""


@dataclass(slots=True)
class SampleRun:
    """A sample and the progress of its attempts."""

    request: Request
    state: State = MACHINE.initial
    emitted: list[int] = field(default_factory=list)
    """Tokens sent to the client, or about to be sent."""
    ticket: SealedTicket | None = None
    excluded: set[str] = field(default_factory=set)
    """Addresses of workers that failed this sample since its last new token."""
    failures: int = 0
    """Consecutive failures without a new token."""
    failed_steps: int = 0
    """Consecutive failed steps that contained the sample."""
    last_error: KvferryError | None = None
    num_cached_tokens: int = 0
    """Number of prompt tokens whose KV was cached or loaded."""
    num_loaded_tokens: int = 0
    """Number of the cached tokens that were loaded from a tier or another worker."""
    num_written_tokens: int = 0
    """Number of prompt tokens whose KV was computed and put in a prefix cache."""
    computed: tuple[ComputedTokens, ...] = ()
    """The prompt's tokens that workers computed for this sample, by cause."""
    num_elsewhere: int = 0
    """Number of the prompt's leading tokens that a worker of the exact cache map had, other than the one that computes
    the prompt."""
    retained_at: str = ""
    """Address of the worker that keeps the prompt; empty if none does."""
    timing: Timing = field(default_factory=Timing)
    routes: list[RouteNote] = field(default_factory=list)
    """Routing decisions, in order."""
    pooling: PoolingParams | None = None
    """Set if a vector of the prompt is computed instead of tokens."""
    names: PromptNames = field(default_factory=PromptNames)
    """Hashes of the blocks of `token_ids`."""
    trace: NoTrace = NO_TRACE
    """Records the sample's phases, if its request is traced."""
    commitment: Commitment | None = None
    """Dispatched work that its workers' statuses do not show yet; `None` if there is none."""
    num_beams: int = 0
    """Width of the beam search of which this is the record, with the tokens of one beam in `emitted`; 0 for a
    sample."""
    is_step: bool = False
    """Whether this is a step of a beam search, which has a record of its own."""

    def __post_init__(self) -> None:
        if self.request.caller.queued_seconds:
            self.time(queue_seconds=self.request.caller.queued_seconds)

    def on(self, event: SampleEvent) -> None:
        """Apply `event`: change the state according to `sample_states.MACHINE`.

        Raises:
            InvariantBroken: `event` is illegal in the current state.
        """
        self.state = MACHINE.next(self.state, event)

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt's tokens and the tokens generated so far."""
        return [*self.request.token_ids, *self.emitted] if self.emitted else self.request.token_ids

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of tokens that the sample may still generate; 0 for a vector."""
        return 0 if self.pooling is not None else max(0, (self.request.sampling.max_tokens or 0) - len(self.emitted))

    @property
    def num_output(self) -> int:
        """Number of output tokens; over all beams of a beam search."""
        return len(self.emitted) * max(1, self.num_beams)

    @property
    def is_complete(self) -> bool:
        """Whether `max_tokens` tokens were generated, even if the stream was lost before its finish reason."""
        return len(self.emitted) >= (self.request.sampling.max_tokens or 0)

    def time(self, **changes: float | int | str | Retention) -> None:
        """Update fields of `timing`."""
        self.timing = replace(self.timing, **changes)  # type: ignore[arg-type]  # dataclasses.replace is untyped

    def reused(self, *, num_cached: int, num_loaded: int, num_written: int = 0) -> None:
        """Record the sources of the prompt's KV on the worker of the first token. A later hand-off changes none.

        Args:
            num_cached: number of tokens that were in the worker's prefix cache.
            num_loaded: number of tokens that were loaded from a tier or another worker.
            num_written: number of tokens that were computed and put in the worker's prefix cache.
        """
        self.num_cached_tokens = num_cached + num_loaded
        self.num_loaded_tokens, self.num_written_tokens = num_loaded, num_written

    @property
    def account(self) -> tuple[str, str]:
        """The tenant, and the name of the adapter or an empty string, to which the sample's tokens are counted."""
        caller = self.request.caller
        return caller.tenant, "" if caller.adapter is None else caller.adapter.name

    def note_computed(self, computed: Sequence[ComputedTokens]) -> None:
        """Add tokens of the prompt that a worker computed, by cause."""
        if computed:
            self.computed = summed((*self.computed, *computed))

    def retained(self, retention: Retention, address: str) -> None:
        """Record what a worker granted, as long as it is not lost."""
        self.time(retention=retention)
        self.retained_at = address

    def report_kv(self, reports: tuple[KvReport, ...]) -> None:
        """Add a worker's reports on the source of the KV to `timing`."""
        if reports:
            self.timing = replace(self.timing, kv=(*self.timing.kv, *reports)[-_MAX_REPORTS:])

    def emit(
        self,
        tokens: tuple[SampledToken, ...],
        finish: FinishReason | None,
        now: float,
        scores: tuple[ScoredToken, ...] | None = None,
        weight_version: str = "",
    ) -> TokenEvent:
        """Record new tokens, reset the failure count and return the tokens' event.

        Args:
            tokens: the new tokens; empty if only the stream's end is reported.
            finish: finish reason; `None` while the sample continues.
            now: monotonic time in seconds.
            scores: log-probabilities of the prompt's tokens; `None` if they are not reported with these tokens.
            weight_version: version of the weights that made the tokens; empty: as the previous ones.
        """
        if tokens:
            if not self.emitted:
                self.time(first_token_seconds=now - self.request.caller.arrived)
            elif self.failures:
                self.time(resumed=self.timing.resumed + 1)
                self.trace.resumed(len(self.emitted))
            versions = with_version(self.timing.weight_versions, weight_version, len(self.emitted))
            if versions is not self.timing.weight_versions:
                self.timing = replace(self.timing, weight_versions=versions)
            self.emitted.extend(token.token_id for token in tokens)
            self.failures = self.failed_steps = 0
            self.excluded.clear()
        return TokenEvent(tokens, finish, self.num_cached_tokens, self.timing, scores, self.num_written_tokens)

    def failed(self, error: KvferryError, address: str | None, *, in_failed_step: bool = False) -> None:
        """Record a failed call, or a failed search for a worker if `address` is `None`.

        Args:
            error: the failure.
            address: worker of the call, which the sample avoids; `None` if no worker was found.
            in_failed_step: whether the sample was part of a step that failed.
        """
        self.failures += 1
        self.failed_steps += in_failed_step
        self.last_error = error
        if address is not None:
            self.excluded.add(address)
            if address == self.retained_at:  # what a lost worker kept is lost with it
                self.timing, self.retained_at = replace(self.timing, retention=None), ""

    def backoff_seconds(self, config: RetryConfig, *, elsewhere: bool) -> float:
        """Return the delay before the next attempt in seconds: exponential with a jitter factor in [0.5, 1), so that
        the streams of a lost worker do not retry simultaneously; 0 for the first retry if `elsewhere`.

        Args:
            config: delays of retries.
            elsewhere: whether a different worker is available.
        """
        if elsewhere and self.failures <= 1:
            return 0.0
        # The bound on the exponent only prevents float overflow.
        doubled = config.first_backoff_seconds * 2.0 ** min(self.failures - 1, 30)
        share = uniform(self.request.sampling.seed or 0, self.request.sample_index, self.failures)
        return min(config.max_backoff_seconds, doubled) * (0.5 + 0.5 * share)
