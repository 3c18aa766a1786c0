"""A bounded log of ended requests: their routes, the source of their KV, their timing.

`kvferry explain` reads it shortly after a request; long-term records are in metrics and traces. A tenant can read only
its own requests; entries contain neither text nor tokens.
"""

from collections import OrderedDict
from dataclasses import asdict

from kvferry.core.ids import RequestId
from kvferry.gateway.lifecycle.sample_run import SampleRun

_MAX_REQUESTS = 1024
_MAX_SAMPLES = 16


class Journal:
    """The most recently ended requests, by tenant and id. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, RequestId], list[dict[str, object]]] = OrderedDict()

    def add(self, run: SampleRun) -> None:
        """Add an entry for an ended sample."""
        asked = run.request
        key = (asked.tenant, asked.request_id)
        samples = self._entries.setdefault(key, [])
        self._entries.move_to_end(key)
        if len(samples) < _MAX_SAMPLES:
            samples.append(
                {
                    "sample_index": asked.sample_index,
                    "outcome": run.state.value,
                    "error": "" if run.last_error is None else run.last_error.message,
                    "prompt_tokens": len(asked.token_ids),
                    "output_tokens": len(run.emitted),
                    "cached_tokens": run.num_cached_tokens,
                    "routes": [asdict(note) for note in run.routes],
                    "timing": asdict(run.timing),
                }
            )
        if len(self._entries) > _MAX_REQUESTS:
            self._entries.popitem(last=False)

    def find(self, tenant: str, request_id: RequestId) -> list[dict[str, object]] | None:
        """Return the entries of a request's samples; `None` if the request belongs to a different tenant, was evicted,
        or is still running."""
        return self._entries.get((tenant, request_id))

    def find_any(self, request_id: RequestId) -> list[tuple[str, list[dict[str, object]]]]:
        """Return (tenant, ended samples) for each tenant that used this request id; for operators."""
        return [(tenant, samples) for (tenant, found), samples in self._entries.items() if found == request_id]
