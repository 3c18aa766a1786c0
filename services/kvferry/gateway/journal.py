"""What became of the last requests: who served them and why, where their KV came from, where the time went.

A bounded memory for whoever asks "why was this one slow?" shortly afterwards (`kvferry explain`); metrics and traces
are for the rest. A request is shown to its own tenant only, and holds no text and no token.
"""

from collections import OrderedDict
from dataclasses import asdict

from kvferry.core.ids import RequestId
from kvferry.gateway.trip import Trip

_MAX_REQUESTS = 1024
_MAX_SAMPLES = 16


class Journal:
    """The last requests by id. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, RequestId], list[dict[str, object]]] = OrderedDict()

    def add(self, trip: Trip) -> None:
        """Note a sample that has ended, however it did."""
        asked = trip.request
        key = (asked.tenant, asked.request_id)
        samples = self._entries.setdefault(key, [])
        self._entries.move_to_end(key)
        if len(samples) < _MAX_SAMPLES:
            samples.append(
                {
                    "sample_index": asked.sample_index,
                    "outcome": trip.state.value,
                    "error": "" if trip.last_error is None else trip.last_error.message,
                    "prompt_tokens": len(asked.token_ids),
                    "output_tokens": len(trip.emitted),
                    "cached_tokens": trip.num_cached_tokens,
                    "routes": [asdict(note) for note in trip.routes],
                    "timing": asdict(trip.timing),
                }
            )
        if len(self._entries) > _MAX_REQUESTS:
            self._entries.popitem(last=False)

    def find(self, tenant: str, request_id: RequestId) -> list[dict[str, object]] | None:
        """A request's samples as they ended; `None`: not this tenant's, too old, or still running."""
        return self._entries.get((tenant, request_id))
