"""A bounded log of ended requests: their routes, the source of their KV, their timing.

`kvferry explain` reads it shortly after a request; long-term records are in metrics and traces. A tenant can read only
its own requests; entries contain neither text nor tokens.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice

from kvferry.core.causes import ComputedTokens
from kvferry.core.errors import shortened
from kvferry.core.ids import RequestId
from kvferry.core.inference.chunks import Timing
from kvferry.gateway.decide.lifecycle.sample_run import SampleRun
from kvferry.gateway.decide.routing.route_notes import RouteNote
from kvferry.gateway.observe.dashboard.phases import Phase, phases

_MAX_REQUESTS = 1024
_MAX_SAMPLES = 16
_MAX_NAMED = 4
"""Maximum number of ids in a message."""
MAX_LISTED = 200
"""Maximum number of requests in a list."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """An ended sample. It is converted only when it is read, since few entries are read."""

    sample_index: int
    outcome: str
    error: str
    prompt_tokens: int
    output_tokens: int
    """Output tokens; those of all beams for a beam search."""
    cached_tokens: int
    beam_width: int
    """Number of beams of a beam search; 0 for a sample."""
    routes: tuple[RouteNote, ...]
    timing: Timing
    computed: tuple[ComputedTokens, ...]
    """Tokens of the prompt that workers computed, by cause."""

    def shown(self) -> dict[str, object]:
        """Return the entry's JSON object."""
        return {**asdict(self), "phases": [asdict(phase) for phase in _phases(self.timing)]}


class Journal:
    """The most recently ended requests, by tenant and id. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, RequestId], list[_Sample]] = OrderedDict()

    def add(self, run: SampleRun) -> None:
        """Add an entry for an ended sample."""
        request = run.request
        key = (request.caller.tenant, request.caller.request_id)
        samples = self._entries.setdefault(key, [])
        self._entries.move_to_end(key)
        if len(samples) < _MAX_SAMPLES:
            samples.append(
                _Sample(
                    request.sample_index,
                    run.state.value,
                    "" if run.last_error is None else run.last_error.message,
                    len(request.token_ids),
                    run.num_output,
                    run.num_cached_tokens,
                    run.num_beams,
                    tuple(run.routes),
                    run.timing,
                    run.computed,
                )
            )
        if len(self._entries) > _MAX_REQUESTS:
            self._entries.popitem(last=False)

    def find(self, tenant: str, request_id: RequestId) -> list[dict[str, object]] | None:
        """Return the entries of a request's samples; `None` if the request belongs to a different tenant, was evicted,
        or is still running.

        Args:
            tenant: tenant of the caller.
            request_id: id of the request.
        """
        samples = self._entries.get((tenant, request_id))
        return None if samples is None else [sample.shown() for sample in samples]

    def find_any(self, request_id: RequestId) -> list[tuple[str, list[dict[str, object]]]]:
        """Return (tenant, ended samples) for each tenant that used this request id. For administrators only."""
        return [
            (tenant, [sample.shown() for sample in samples])
            for (tenant, found), samples in self._entries.items()
            if found == request_id
        ]

    def why_missing(self, request_id: RequestId, tenant: str | None = None) -> str:
        """Explain why a request has no entry. A request with several prompts has an entry for each; the message names
        them.

        Args:
            request_id: id of the request.
            tenant: name only requests of this tenant; `None` for all.
        """
        parts = [
            found
            for owner, found in self._entries
            if found.startswith(f"{request_id}-")
            and found[len(request_id) + 1 :].isdecimal()
            and tenant in (owner, None)
        ]
        if parts:
            more = f" and {len(parts) - _MAX_NAMED} more" if len(parts) > _MAX_NAMED else ""
            named = ", ".join(shortened(part) for part in parts[:_MAX_NAMED])
            reason = f"has a record for each of its prompts; use one of the ids {named}{more}"
        else:
            reason = (
                "not found: it is still running, was served by another gateway or before this gateway started, or is "
                f"older than the last {_MAX_REQUESTS:,} requests"
            )
        return f"request {shortened(request_id)!r} {reason}"

    def recent(self, limit: int) -> list[dict[str, object]]:
        """Return the requests with the newest ended samples, newest first, at most `limit` and `MAX_LISTED`; for
        operators. `find_any` has the details of each."""
        newest = islice(reversed(self._entries.items()), max(0, min(limit, MAX_LISTED)))
        return [_summary(tenant, request_id, samples) for (tenant, request_id), samples in newest]


def _phases(timing: Timing) -> list[Phase]:
    return phases(
        queue=timing.queue_seconds,
        prefill=timing.prefill_seconds,
        first_token=timing.first_token_seconds,
        handoff=timing.handoff_seconds,
        total=timing.total_seconds,
    )


def _summary(tenant: str, request_id: RequestId, samples: Sequence[_Sample]) -> dict[str, object]:
    """Return the entry of a request in a list: sums over its samples, the slowest sample's timing."""
    bad = [sample.outcome for sample in samples if sample.outcome != "done"]
    return {
        "request_id": request_id,
        "tenant": tenant,
        "outcome": bad[0] if bad else "done",
        "num_samples": len(samples),
        "beam_width": samples[0].beam_width,
        "prompt_tokens": samples[0].prompt_tokens,
        "cached_tokens": samples[0].cached_tokens,
        "output_tokens": sum(sample.output_tokens for sample in samples),
        "first_token_seconds": max(sample.timing.first_token_seconds for sample in samples),
        "total_seconds": max(sample.timing.total_seconds for sample in samples),
    }
