"""Groups a request's tokens into parts of its stream: fewer, larger parts cost less on the event loop and the wire.

The first token is delivered at once; later tokens wait until there are `interval` of them, or the request ends.
"""

from dataclasses import dataclass, field

from kvferry.core.ids import RequestId
from kvferry.engine.loop.engine_stream import StreamItem

Delivery = tuple[RequestId, StreamItem, bool]
"""A request, its event, and whether it is the request's last one."""


@dataclass(slots=True)
class _Part:
    """Events of a request that wait for further tokens."""

    items: list[StreamItem] = field(default_factory=list)
    num_tokens: int = 0


class StreamInterval:
    """The pending parts of all requests whose output has begun. Used on the engine's thread only."""

    def __init__(self, interval: int) -> None:
        """
        Args:
            interval: number of tokens in each part after the first, at least 1.
        """
        self._interval = interval
        self._parts: dict[RequestId, _Part] = {}

    def due(self, items: list[Delivery]) -> list[Delivery]:
        """Add the events of a step, and return the events to deliver now, in order."""
        if self._interval == 1:
            return items
        found: list[Delivery] = []
        for request_id, item, is_last in items:
            count = 0 if item.update is None else len(item.update.tokens)
            part = self._parts.pop(request_id, None)
            if part is not None and not is_last and part.num_tokens + count < self._interval:
                part.items.append(item)
                part.num_tokens += count
                self._parts[request_id] = part
                continue
            found += [(request_id, one, False) for one in (part.items if part is not None else ())]
            found.append((request_id, item, is_last))
            if not is_last and (part is not None or count):
                self._parts[request_id] = _Part()
        return found

    def drop(self, request_id: RequestId) -> None:
        """Drop a request that has ended or was aborted."""
        self._parts.pop(request_id, None)

    @property
    def num_open(self) -> int:
        """Number of requests whose output has begun."""
        return len(self._parts)
