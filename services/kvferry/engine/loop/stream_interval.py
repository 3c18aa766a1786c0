"""How many tokens of a request are handed out at once: fewer, larger parts cost less on the event loop and the wire.

The first token is handed out at once; later ones wait until there are `interval` of them, or the request ends.
"""

from kvferry.core.ids import RequestId
from kvferry.engine.loop.engine_stream import StreamItem

Delivery = tuple[RequestId, StreamItem, bool]
"""A request, its event, and whether it is the request's last one."""


class StreamInterval:
    """Events that wait for further tokens of their request. Used on the engine's thread only."""

    def __init__(self, interval: int) -> None:
        """
        Args:
            interval: tokens of a part after the first one, at least 1.
        """
        self._interval = interval
        self._waiting: dict[RequestId, list[StreamItem]] = {}
        """Events by request, an empty list after a delivery; only of requests that have begun their output."""
        self._num_tokens: dict[RequestId, int] = {}

    def due(self, items: list[Delivery]) -> list[Delivery]:
        """Take the events of a step, and return those to deliver now, in order."""
        if self._interval == 1:
            return items
        found: list[Delivery] = []
        for request_id, item, is_last in items:
            count = 0 if item.update is None else len(item.update.tokens)
            waiting = self._waiting.get(request_id)
            if waiting is None or is_last:
                found += [(request_id, one, False) for one in waiting or ()]
                found.append((request_id, item, is_last))
                self.drop(request_id)
                if count and not is_last:
                    self._waiting[request_id], self._num_tokens[request_id] = [], 0
                continue
            waiting.append(item)
            self._num_tokens[request_id] += count
            if self._num_tokens[request_id] >= self._interval:
                found += [(request_id, one, False) for one in waiting]
                self._waiting[request_id], self._num_tokens[request_id] = [], 0
        return found

    def drop(self, request_id: RequestId) -> None:
        """Forget a request that has ended or was aborted."""
        self._waiting.pop(request_id, None)
        self._num_tokens.pop(request_id, None)

    @property
    def num_open(self) -> int:
        """Number of requests with an output that has begun."""
        return len(self._waiting)
