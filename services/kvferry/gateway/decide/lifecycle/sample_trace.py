"""The spans of one sample. A sample without a trace has `NO_TRACE`, whose methods do nothing."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from kvferry.core.errors import KvferryError
from kvferry.core.inference.chunks import Timing
from kvferry.core.traces.spans import Attribute, Kind, Span
from kvferry.gateway.decide.routing.routes import Pick, Route

Metadata = tuple[tuple[str, str], ...]


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


_NO_CALL: AbstractContextManager[Metadata | None] = nullcontext()
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
        span = self._call = self._span.child(name, attributes=attributes, kind=Kind.CLIENT)
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
